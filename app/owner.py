"""Who runs a run: one command at a time, and commits of a former attempt are refused."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil

from app.errors import RunConflict
from app.storage import Store
from app.storage.documents import read_json, write_json

OWNER = "owner.json"
_RENEW_S = 5.0
_STALE_S = 20.0  # several renewals may fail before another command takes over
_writing = threading.RLock()  # the thread that renews is not alone


@dataclass(frozen=True)
class Owner:
    """The contents of `owner.json`. `attempt` only ever grows; `renewed` is Unix time, 0 once released."""

    attempt: int
    token: str
    host: str
    pid: int
    renewed: float

    @property
    def alive(self) -> bool:
        if time.time() - self.renewed > _STALE_S:
            return False
        return self.host != socket.gethostname() or psutil.pid_exists(self.pid)


class Ownership:
    """This command's claim on a run. It is handed between processes by pickling; one at a time writes.

    Raises (from `claim`): RunConflict while another command runs.
    """

    def __init__(self, store: Store, owner: Owner) -> None:
        self._store, self._owner = store, owner

    @classmethod
    def claim(cls, store: Store, token: str | None = None) -> Ownership:
        """Takes the run over. `token` names the command; one that claims again keeps its place."""
        last = read_owner(store)
        if last and last.alive and last.token != token:
            raise RunConflict(
                f"{store.uri} is already running: attempt {last.attempt} on {last.host}, pid {last.pid}, "
                f"renewed {time.time() - last.renewed:.0f} s ago. Wait for it, stop it, or choose another run.name"
            )
        owner = Owner(
            attempt=last.attempt if last else 0,
            token=token or uuid.uuid4().hex,
            host=socket.gethostname(),
            pid=os.getpid(),
            renewed=time.time(),
        )
        ownership = cls(store, owner)
        ownership.renew()
        return ownership

    @property
    def attempt(self) -> int:
        return self._owner.attempt

    def renew(self) -> None:
        self._write(renewed=time.time())

    def next_attempt(self) -> int:
        with _writing:
            self._write(attempt=self._owner.attempt + 1, renewed=time.time())
            return self._owner.attempt

    def release(self) -> None:
        self._write(renewed=0.0)

    def keep(self) -> None:
        """Renews from a daemon thread for as long as this process lives."""

        def renew_for_ever() -> None:
            while self._owner.renewed:
                time.sleep(_RENEW_S)
                # Locked, or it would renew what is released in this moment; and a full disk is no reason to give up.
                with _writing, contextlib.suppress(OSError):
                    if self._owner.renewed and self.holds():
                        self.renew()

        threading.Thread(target=renew_for_ever, daemon=True, name="owner").start()

    def holds(self) -> bool:
        """Whether no later command has taken the run over."""
        owner = read_owner(self._store)
        return owner is not None and owner.token == self._owner.token

    def _write(self, **changes: Any) -> None:
        with _writing:
            self._owner = replace(self._owner, **changes)
            write_json(self._store, OWNER, asdict(self._owner))


def read_owner(store: Store) -> Owner | None:
    found = read_json(store, OWNER)
    return Owner(**found) if found else None
