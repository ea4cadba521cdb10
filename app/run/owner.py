"""Let one command at a time run a run, and let commits of a former attempt be refused.

`owner.json` is a lease: the command that runs the run renews it, and another one may take it over once it has expired.
"""

import contextlib
import json
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Self

import psutil

from app.errors import RunConflict
from app.storage import Store
from app.storage.documents import write_json

_OWNER = "owner.json"
_ANNOUNCEMENT = "claim-"
_RENEW_INTERVAL_S = 5.0
# Several renewals may fail before another command takes over. Longer would keep the user waiting after a lost machine.
_STALE_S = 20.0
_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 2.0

# A process has several threads that write: one renews, another begins attempts.
_write_lock = threading.RLock()


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
        # Clocks of machines are compared, so they may differ by a few seconds, as NTP keeps them, and not by many.
        if time.time() - self.renewed > _STALE_S:
            return False
        # On this machine a killed command is known at once: typing it again must not wait for a lease to expire.
        return self.host != socket.gethostname() or psutil.pid_exists(self.pid)


class Ownership:
    """The claim of this command on a run. `renew` and `next_attempt` raise RunConflict once another has taken over.

    It is handed between processes by pickling; one at a time writes.
    """

    def __init__(self, store: Store, owner: Owner) -> None:
        self._store = store
        self._owner = owner

    @classmethod
    def claim(cls, store: Store, token: str | None = None) -> Self:
        """Take over a run that no other command runs, else raise RunConflict. Of commands that race one succeeds.

        Args:
            token: names the command; one that claims again keeps its place.
        """
        token = token or uuid.uuid4().hex
        longest_s = _FIRST_DELAY_S
        deadline = time.monotonic() + 2 * _STALE_S
        while time.monotonic() < deadline:
            claimant = Owner(0, token, socket.gethostname(), os.getpid(), time.time())
            with _announced(store, claimant) as alone:
                last = read_owner(store)
                if last and last.alive and last.token != token:
                    where = f"attempt {last.attempt} on {last.host}, pid {last.pid}"
                    ago = f"renewed {time.time() - last.renewed:.0f} s ago"
                    remedy = "Wait for it, stop it, or choose another run.name"
                    raise RunConflict(f"{store.uri} is already running: {where}, {ago}. {remedy}")
                # If storage was so slow that the announcement has expired, others do not count it.
                if alone and claimant.alive:
                    # Attempts are counted on, so that what the last command still has in flight is refused as older.
                    attempt = last.attempt if last else 0
                    owner = replace(claimant, attempt=attempt, renewed=time.time())
                    write_json(store, _OWNER, asdict(owner))
                    return cls(store, owner)

            # Rivals have both withdrawn, and must not come back in step.
            time.sleep(random.uniform(0, longest_s))
            longest_s = min(2 * longest_s, _LONGEST_DELAY_S)
        raise RunConflict(f"{store.uri} is being claimed by another command. Wait for it, or choose another run.name")

    @property
    def attempt(self) -> int:
        return self._owner.attempt

    def renew(self) -> None:
        self._write()

    def next_attempt(self) -> int:
        """Begin another attempt and return its number."""
        self._write(num_begun=1)
        return self._owner.attempt

    def release(self) -> None:
        """Release the claim for the next command. Errors are ignored: a claim that is not released expires."""
        with contextlib.suppress(RunConflict, OSError):
            self._write(held=False)

    def renew_in_background(self) -> None:
        """Renew the claim from a daemon thread for as long as this process lives."""

        def renew_for_ever() -> None:
            while self._owner.renewed:
                time.sleep(_RENEW_INTERVAL_S)
                # Without the lock this could renew what another thread releases at this moment. And a disk that is
                # full now is no reason to give up: it may have room before the claim expires.
                with _write_lock, contextlib.suppress(RunConflict, OSError):
                    # A run that has been deleted must not come back as a folder with nothing but an owner.
                    if self._owner.renewed and read_owner(self._store):
                        self.renew()

        threading.Thread(target=renew_for_ever, daemon=True, name="owner").start()

    def _write(self, num_begun: int = 0, held: bool = True) -> None:
        with _write_lock:
            # Not from this object's own memory: another process of this command may have begun attempts meanwhile.
            found = read_owner(self._store) or self._owner
            if found.token != self._owner.token:
                raise RunConflict(f"another command has taken over {self._store.uri}: on {found.host}, pid {found.pid}")
            renewed = time.time() if held else 0.0
            self._owner = replace(found, attempt=found.attempt + num_begun, renewed=renewed)
            write_json(self._store, _OWNER, asdict(self._owner))


def read_owner(store: Store, name: str = _OWNER) -> Owner | None:
    """Return the last owner of a run, None if there was none. Raises OSError if storage does not say."""
    try:
        return Owner(**json.loads(store.read(name)))
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return None


# Mutual exclusion without a compare-and-swap, which pyarrow has for no bucket. All that it needs is that a file is seen
# by everyone once its write has returned: a claimant announces itself in a file of its own, and then writes
# `owner.json` only if it sees no other announcement. Of two claimants, the one that looks last sees either the other or
# what the other has written. No lock of a killed command has to be broken: its announcement expires, as a claim does.


@contextlib.contextmanager
def _announced(store: Store, claimant: Owner) -> Iterator[bool]:
    """Announce a claimant while the context is entered. Yields whether it is the only one."""
    name = f"{_ANNOUNCEMENT}{uuid.uuid4().hex}.json"
    try:
        write_json(store, name, asdict(claimant))
        yield not _has_rival(store, name)
    finally:
        with contextlib.suppress(OSError):
            store.delete(name)


def _has_rival(store: Store, announced: str) -> bool:
    for name in store.list(""):
        if name.startswith(_ANNOUNCEMENT) and name != announced:
            rival = read_owner(store, name)
            if rival and rival.alive:
                return True
            store.delete(name)  # left by a command that was killed
    return False
