"""Let one command at a time run a run, and let commits of a former attempt be refused.

`owner.json` is a lease: the command that runs the run renews it, and another one may take it over once it has expired.
Everybody who sees the run may read it. `owner.key` is a secret for the run's user alone, from which the name of node
memory follows. A command that takes over from a killed one keeps the secret, and so finds the copies.
"""

import contextlib
import json
import math
import os
import random
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import psutil

from app.errors import RunConflict, StorageError
from app.storage import Store
from app.storage.documents import read_document, write_json

_OWNER = "owner.json"
_KEY = "owner.key"
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
    def gone(self) -> bool:
        """Return whether its command has ended for certain: it has released the claim, or was killed on this host."""
        return not self.renewed or (self.host == socket.gethostname() and not psutil.pid_exists(self.pid))

    @property
    def age_s(self) -> float:
        """Return how long ago it was renewed, as far as its host's clock and this one's agree."""
        return time.time() - self.renewed

    def to_line(self) -> dict[str, Any]:
        return asdict(self)


class _Watch:
    """What other commands have written, and for how long it has been seen to stay the same.

    Clocks of hosts need not agree, so an owner elsewhere is gone once it is *seen* not to renew for as long as a lease.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Owner, float]] = {}  # by the name of the file, with the time of this host

    def expired(self, name: str, owner: Owner) -> bool:
        """Return whether this has stood in the file for as long as a lease."""
        seen, since_s = self._seen.get(name, (None, 0.0))
        if seen != owner:
            self._seen[name] = owner, time.monotonic()
            return False
        return time.monotonic() - since_s >= _STALE_S

    def changed(self, name: str, owner: Owner) -> bool:
        """Return whether the file held something else when it was seen before."""
        return name in self._seen and self._seen[name][0] != owner


class Ownership:
    """The claim of this command on a run. `renew` and `next_attempt` raise RunConflict once another has taken over.

    It is handed between processes by pickling; one at a time writes.

    Attributes:
        lost: what renewing in the background has found out: why this command owns the run no more; "" as long as it
            does. Who takes it for a reason to end looks here.
    """

    def __init__(self, store: Store, owner: Owner) -> None:
        self._store = store
        self._owner = owner
        self.lost = ""

    @classmethod
    def claim(cls, store: Store, token: str | None = None, say: Callable[[str], object] = lambda _: None) -> Self:
        """Take over a run that no other command runs, else raise RunConflict. Of commands that race one succeeds.

        Args:
            token: names the command; one that claims again keeps its place.
            say: tells the user what is waited for.

        Raises:
            StorageError: storage does not take the claim.
        """
        try:
            return cls(store, _claimed(store, token or uuid.uuid4().hex, say))
        except OSError as error:
            raise StorageError(
                f"the claim on {store.uri} cannot be read or written: {error}. Choose another run.storage, or delete "
                f"what is in the way of {_OWNER}"
            ) from error

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

    def holds(self) -> bool:
        """Return whether the run is this command's now, as storage says; if storage says nothing, it is not."""
        with contextlib.suppress(OSError):
            owner = read_owner(self._store)
            return owner is not None and owner.token == self._owner.token
        return False

    def renew_in_background(self) -> None:
        """Renew the claim from a daemon thread for as long as this process lives."""

        def renew_for_ever() -> None:
            while self._owner.renewed:
                time.sleep(_RENEW_INTERVAL_S)
                # Without the lock this could renew what another thread releases at this moment. And a disk that is
                # full now is no reason to give up: it may have room before the claim expires.
                try:
                    with _write_lock, contextlib.suppress(OSError):
                        # A run that has been deleted must not come back as a folder with nothing but an owner.
                        if self._owner.renewed and read_owner(self._store):
                            self.renew()
                except RunConflict as error:
                    self.lost = str(error)
                    return

        threading.Thread(target=renew_for_ever, daemon=True, name="owner").start()

    def _write(self, num_begun: int = 0, held: bool = True) -> None:
        with _write_lock:
            # Not from this object's own memory: another process of this command may have begun attempts meanwhile.
            found = read_owner(self._store) or self._owner
            if found.token != self._owner.token:
                raise RunConflict(
                    f"another command has taken over {self._store.uri}: on {found.host}, pid {found.pid}. It goes on "
                    "from the newest checkpoint; for a run beside it choose another run.name"
                )
            renewed = time.time() if held else 0.0
            self._owner = replace(found, attempt=found.attempt + num_begun, renewed=renewed)
            write_json(self._store, _OWNER, self._owner.to_line())


def read_owner(store: Store, name: str = _OWNER) -> Owner | None:
    """Return the last owner of a run, None if there was none. Raises OSError if storage does not say."""
    try:
        return _parse(json.loads(read_document(store, name)))
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, RecursionError):
        return None


def read_key(store: Store) -> str:
    """Return the secret of a run; "" if this user may not read it, or there is none."""
    try:
        return read_document(store, _KEY).decode("ascii", "replace")
    except OSError:
        return ""


def write_key(store: Store) -> None:
    """Give a run a new secret: copies in node memory are not found any more. Raises OSError."""
    store.commit(_KEY, secrets.token_hex(16).encode(), private=True)


def _parse(fields: dict[str, Any]) -> Owner:
    """Return the owner that a file names. Raises TypeError or ValueError if it is not what a command writes."""
    owner = Owner(**fields)
    wanted = (int, str, str, int, int | float)
    for value, kind in zip(fields.values(), wanted, strict=True):
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{value!r} is no {kind}")
    if owner.attempt < 0 or not 0 < owner.pid < 2**31:
        raise ValueError(f"attempt {owner.attempt}, pid {owner.pid}")
    # It is compared with what is read next, so it must be equal to itself; and a clock may be anything.
    return owner if math.isfinite(owner.renewed) else replace(owner, renewed=-1.0)


def _claimed(store: Store, token: str, say: Callable[[str], object]) -> Owner:
    """Write `owner.json` for the command that `token` names, and return what is in it. Raises as `claim` does."""
    watch = _Watch()
    longest_s = _FIRST_DELAY_S
    _wait_for_owner(store, token, watch, say)
    deadline = time.monotonic() + 2 * _STALE_S
    while time.monotonic() < deadline:
        began = time.monotonic()
        claimant = Owner(0, token, socket.gethostname(), os.getpid(), time.time())
        with _announced(store, claimant, watch) as alone:
            last = read_owner(store)
            is_free = last is None or last.token == token or last.gone or watch.expired(_OWNER, last)
            # Others do not count an announcement that they have seen for as long as a lease.
            if is_free and alone and time.monotonic() - began < _STALE_S / 2:
                # Attempts are counted on, so that what the last command still has in flight is refused as older.
                attempt = last.attempt if last else 0
                owner = replace(claimant, attempt=attempt, renewed=time.time())
                if last is None or not read_key(store):
                    write_key(store)
                write_json(store, _OWNER, owner.to_line())
                return owner

        if not is_free:
            _wait_for_owner(store, token, watch, say)
        # Rivals have both withdrawn, and must not come back in step.
        time.sleep(random.uniform(0, longest_s))
        longest_s = min(2 * longest_s, _LONGEST_DELAY_S)
    raise RunConflict(f"{store.uri} is being claimed by another command. Wait for it, or choose another run.name")


def _wait_for_owner(store: Store, token: str, watch: _Watch, say: Callable[[str], object]) -> None:
    """Return once no other command runs the run, as far as can be seen. Raises RunConflict if one does."""
    told = False
    while True:
        owner = read_owner(store)
        if owner is None or owner.token == token or owner.gone:
            return
        changed = watch.changed(_OWNER, owner)
        if watch.expired(_OWNER, owner):
            return
        # A clock may be wrong. If it says that the claim is fresh, that costs at most another try a little later.
        if changed or abs(owner.age_s) < _STALE_S:
            raise RunConflict(
                f"{store.uri} is already running: attempt {owner.attempt} on {owner.host}, pid {owner.pid}. "
                "Wait for it, stop it, or choose another run.name"
            )
        if not told:
            told = True
            where = f"attempt {owner.attempt} on {owner.host}, pid {owner.pid}"
            say(f"{store.uri} was not released by {where}: taking over unless it shows life within {_STALE_S:g} s")
        time.sleep(min(1.0, _STALE_S / 20))


# Mutual exclusion without a compare-and-swap, which pyarrow has for no bucket. All that it needs is that a file is seen
# by everyone once its write has returned: a claimant announces itself in a file of its own, and then writes
# `owner.json` only if it sees no other announcement. Of two claimants, the one that looks last sees either the other or
# what the other has written. No lock of a killed command has to be broken: its announcement expires, as a claim does.


@contextlib.contextmanager
def _announced(store: Store, claimant: Owner, watch: _Watch) -> Iterator[bool]:
    """Announce a claimant while the context is entered. Yields whether it is the only one."""
    name = f"{_ANNOUNCEMENT}{uuid.uuid4().hex}.json"
    try:
        write_json(store, name, claimant.to_line())
        yield not _has_rival(store, name, watch)
    finally:
        with contextlib.suppress(OSError):
            store.delete(name)


def _has_rival(store: Store, announced: str, watch: _Watch) -> bool:
    for name in store.list(""):
        if name.startswith(_ANNOUNCEMENT) and name != announced:
            rival = read_owner(store, name)
            if rival and not rival.gone and not watch.expired(name, rival):
                return True
            store.delete(name)  # left by a command that was killed
    return False
