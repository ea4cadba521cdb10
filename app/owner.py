"""Who runs a run: one command at a time, and commits of a former attempt are refused."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass, replace

import psutil

from app.errors import RunConflict
from app.storage import Store
from app.storage.documents import write_json

_OWNER = "owner.json"
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

    Raises (from `claim`): RunConflict while another command runs; from `renew` and `next_attempt`: after another has
    taken over, which it may when this one was not heard of for long.
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
        write_json(store, _OWNER, asdict(owner))
        return cls(store, owner)

    @property
    def attempt(self) -> int:
        return self._owner.attempt

    def renew(self) -> None:
        self._write()

    def next_attempt(self) -> int:
        self._write(begun=1)
        return self._owner.attempt

    def release(self) -> None:
        """For the next command; if storage refuses, it finds out by itself."""
        with contextlib.suppress(RunConflict, OSError):
            self._write(held=False)

    def keep(self) -> None:
        """Renews from a daemon thread for as long as this process lives."""

        def renew_for_ever() -> None:
            while self._owner.renewed:
                time.sleep(_RENEW_S)
                # Locked, or it would renew what is released in this moment; and a full disk is no reason to give up.
                with _writing, contextlib.suppress(RunConflict, OSError):
                    if self._owner.renewed and read_owner(self._store):  # or the run has been deleted
                        self.renew()

        threading.Thread(target=renew_for_ever, daemon=True, name="owner").start()

    def _write(self, begun: int = 0, held: bool = True) -> None:
        """On top of what is there: another process of this command may have begun attempts."""
        with _writing:
            found = read_owner(self._store) or self._owner
            if found.token != self._owner.token:
                raise RunConflict(f"another command has taken over {self._store.uri}: on {found.host}, pid {found.pid}")
            renewed = time.time() if held else 0.0
            self._owner = replace(found, attempt=found.attempt + begun, renewed=renewed)
            write_json(self._store, _OWNER, asdict(self._owner))


def read_owner(store: Store) -> Owner | None:
    """
    Raises:
        OSError: storage does not say whether there is one.
    """
    try:
        return Owner(**json.loads(store.read(_OWNER)))
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return None
