"""Ensure that one command at a time owns a run.

`owner.json` is a lease: the owning command renews the lease, and another command may take over an expired lease. Each
user with access to the run may read the file. `owner.key` is a secret that only the run's user may read, and the name
of the node memory is derived from the secret. A command that takes over from a killed command keeps the secret, and so
finds the killed command's snapshots. Commits of an earlier attempt are refused.
"""

import contextlib
import json
import math
import os
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import psutil

from steadfast.backoff import delays
from steadfast.errors import RunConflict, StorageError
from steadfast.storage import Store
from steadfast.storage.documents import read_document, write_json

_OWNER = "owner.json"
_KEY = "owner.key"
_ANNOUNCEMENT = "claim-"
_RENEW_INTERVAL_S = 5.0
# Several renewals may fail before another command takes over. A longer lease would delay restarts after a lost machine.
_STALE_S = 20.0
_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 2.0

# Two threads of a process write the lease: one renews the lease, another begins attempts. The lock is reentrant,
# because the renewing thread already holds the lock when it calls `_write`.
_write_lock = threading.RLock()


@dataclass(frozen=True)
class Owner:
    """Contents of `owner.json`.

    `attempt` never decreases. `renewed` is Unix time, 0 after a release. `world` names the workers of the attempt by
    rank.
    """

    attempt: int
    token: str
    host: str
    pid: int
    renewed: float
    world: tuple[str, ...] = ()

    @property
    def gone(self) -> bool:
        """Return whether the owning command has certainly ended.

        The command has released its claim, or its process on this host has ended.
        """
        return not self.renewed or self.killed

    @property
    def killed(self) -> bool:
        """Return whether the command's process on this host has ended without a release."""
        # The number of an ended process may belong to another one by now. Then only the age of the lease counts.
        return self.renewed != 0 and self.host == socket.gethostname() and not psutil.pid_exists(self.pid)

    @property
    def age_s(self) -> float:
        """Return the seconds since the renewal, if both hosts' clocks agree."""
        return time.time() - self.renewed

    def to_line(self) -> dict[str, Any]:
        return asdict(self)


class _Watch:
    """Observer of other commands' leases.

    Clocks of hosts may differ, so a lease expires when this host *observes* no renewal for the length of a lease.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Owner, float]] = {}  # by file name: contents and the time of this host

    def expired(self, name: str, owner: Owner) -> bool:
        """Return whether the file was unchanged for the length of a lease."""
        seen, since_s = self._seen.get(name, (None, 0.0))
        if seen != owner:
            self._seen[name] = owner, time.monotonic()
            return False
        return time.monotonic() - since_s >= _STALE_S

    def changed(self, name: str, owner: Owner) -> bool:
        """Return whether the file changed since the last observation."""
        return name in self._seen and self._seen[name][0] != owner


class Ownership:
    """Claim of this command on a run.

    `renew` and `next_attempt` raise RunConflict after another command has taken over. Processes pass the claim on by
    pickling; one process at a time writes.

    Attributes:
        lost: the reason why this command no longer owns the run, set by the background renewal; "" while the command
            owns the run.
    """

    def __init__(self, store: Store, owner: Owner, killed: str = "") -> None:
        self._store = store
        self._owner = owner
        self._killed = killed  # token of the killed command from which this command took over, whose processes may live
        self.lost = ""

    @classmethod
    def claim(cls, store: Store, token: str | None = None, say: Callable[[str], object] = lambda _: None) -> Self:
        """Claim a run that no other command owns.

        If several commands claim the run at once, one of the commands succeeds.

        Args:
            token: identifies the command; a command that claims again with its token keeps the run.
            say: reports to the user why the claim waits.

        Raises:
            RunConflict: another command owns the run.
            StorageError: storage refuses the claim.
        """
        try:
            owner, last = _claimed(store, token or uuid.uuid4().hex, say)
        except OSError as error:
            raise StorageError(
                f"the claim on {store.uri} cannot be read or written: {error}. Choose another run.storage, or delete "
                f"what is in the way of {_OWNER}"
            ) from error
        return cls(store, owner, last.token if last and last.killed else "")

    @property
    def attempt(self) -> int:
        return self._owner.attempt

    @property
    def world(self) -> tuple[str, ...]:
        """Return the workers of the newest attempt by rank, () if unknown."""
        return self._owner.world

    def renew(self) -> None:
        self._write()

    def next_attempt(self, world: tuple[str, ...] = ()) -> int:
        """Begin a new attempt of the workers `world`, and return its number."""
        self._write(begins=world)
        return self._owner.attempt

    def release(self) -> None:
        """Release the claim for the next command.

        Errors are ignored, because a claim that is not released expires.
        """
        with contextlib.suppress(RunConflict, OSError):
            self._write(held=False)

    def holds(self) -> bool:
        """Return whether storage names this command as the owner.

        If storage cannot be read, the answer is False.
        """
        owner = self._stored()
        return owner is not None and self._names_this_command(owner)

    def is_taken_over(self) -> bool:
        """Return whether storage names another command as the owner.

        If storage cannot be read, the answer is False.
        """
        owner = self._stored()
        return owner is not None and not self._names_this_command(owner)

    def _stored(self) -> Owner | None:
        with contextlib.suppress(OSError):
            return read_owner(self._store)
        return None

    def renew_in_background(self) -> None:
        """Renew the claim in a daemon thread while this process lives."""

        def renew_for_ever() -> None:
            while self._owner.renewed:
                time.sleep(_RENEW_INTERVAL_S)
                # The lock prevents a renewal while another thread releases the claim. An OSError such as a full disk is
                # ignored, because a later renewal may succeed before the claim expires.
                try:
                    with _write_lock, contextlib.suppress(OSError):
                        # Renewing the claim of a deleted run would create a folder that contains only an owner.
                        if self._owner.renewed and read_owner(self._store):
                            self.renew()
                except RunConflict as error:
                    self.lost = str(error)
                    return

        threading.Thread(target=renew_for_ever, daemon=True, name="owner").start()

    def _names_this_command(self, owner: Owner) -> bool:
        # A process of the killed command may write the lease that it read before this command's claim.
        return owner.token in (self._owner.token, self._killed)

    def _write(self, begins: tuple[str, ...] | None = None, held: bool = True) -> None:
        with _write_lock:
            # The owner is read from storage, because another process of this command may have begun attempts meanwhile.
            found = read_owner(self._store) or self._owner
            if not self._names_this_command(found):
                raise RunConflict(
                    f"another command has taken over {self._store.uri}: on {found.host}, pid {found.pid}. It goes on "
                    "from the newest checkpoint; for a run beside it choose another run.name"
                )
            newest = max(found, self._owner, key=lambda owner: owner.attempt)
            attempt, world = newest.attempt, newest.world
            if begins is not None:
                attempt, world = attempt + 1, begins
            self._owner = replace(self._owner, attempt=attempt, renewed=time.time() if held else 0.0, world=world)
            write_json(self._store, _OWNER, self._owner.to_line())


def read_owner(store: Store, name: str = _OWNER) -> Owner | None:
    """Return the last owner of a run, None if the run had no owner.

    Raises OSError if storage cannot be read.
    """
    # The run directory may hold any text. A file that describes no owner counts as none, even if it is nested so deeply
    # that the parser gives up.
    try:
        return _parse(json.loads(read_document(store, name)))
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, RecursionError):
        return None


def read_key(store: Store) -> str:
    """Return the secret of a run, "" if missing or not readable."""
    try:
        return read_document(store, _KEY).decode("ascii", "replace")
    except OSError:
        return ""


def write_key(store: Store) -> None:
    """Write a new secret for a run. Raises OSError.

    Workers no longer find existing snapshots in node memory.
    """
    store.commit(_KEY, secrets.token_hex(16).encode(), private=True)


def delete_claim(store: Store) -> None:
    """Delete the owner of a run, so that the folder is no run any more.

    The claim must be this command's. Raises OSError.
    """
    for name in store.list(""):
        if name.startswith(_ANNOUNCEMENT):
            store.delete(name)
    store.delete(_KEY)
    # The owner is last: a deletion that is interrupted leaves a run, which can be deleted again.
    store.delete(_OWNER)


def _parse(fields: dict[str, Any]) -> Owner:
    """Return the owner that a file describes.

    Raises TypeError or ValueError if the fields are invalid.
    """
    owner = replace(Owner(**fields), world=tuple(fields.get("world", ())))
    wanted = (int, str, str, int, int | float)
    for value, kind in zip(vars(owner).values(), wanted, strict=False):  # the fields before `world`
        # Python counts true and false as ints.
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{value!r} is no {kind}")
    # The search for a process with a larger number would raise an OverflowError.
    if owner.attempt < 0 or not 0 < owner.pid < 2**31:
        raise ValueError(f"attempt {owner.attempt}, pid {owner.pid}")
    # Owners are compared with the next one that is read, and NaN differs from itself, so the time must be finite.
    if not math.isfinite(owner.renewed):
        return replace(owner, renewed=-1.0)
    return owner


def _claimed(store: Store, token: str, say: Callable[[str], object]) -> tuple[Owner, Owner | None]:
    """Write `owner.json` for a command. Return its contents and the last owner.

    Raises the same errors as `claim`.
    """
    watch = _Watch()
    # All rivals withdraw after a failed try. Random delays prevent them from announcing themselves together again.
    pauses = delays(_FIRST_DELAY_S, _LONGEST_DELAY_S, jitter=1.0)
    _wait_for_owner(store, token, watch, say)
    # A rival that was killed while it claimed holds up this command for the length of a lease.
    deadline = time.monotonic() + 2 * _STALE_S
    while time.monotonic() < deadline:
        began = time.monotonic()
        claimant = Owner(0, token, socket.gethostname(), os.getpid(), time.time())
        with _announced(store, claimant, watch) as alone:
            last = read_owner(store)
            is_free = last is None or last.token == token or last.gone or watch.expired(_OWNER, last)
            # Other commands ignore an announcement after the length of a lease, so a slow claim must be repeated.
            if is_free and alone and time.monotonic() - began < _STALE_S / 2:
                # The number of attempts continues, so that storage refuses late writes of the last command as older.
                attempt = last.attempt if last else 0
                owner = replace(claimant, attempt=attempt, renewed=time.time())
                # The secret is written first, so that a run with an owner has a secret.
                if last is None or not read_key(store):
                    write_key(store)
                write_json(store, _OWNER, owner.to_line())
                return owner, last

        if not is_free:
            _wait_for_owner(store, token, watch, say)
        time.sleep(next(pauses))
    raise RunConflict(f"{store.uri} is being claimed by another command. Wait for it, or choose another run.name")


def _wait_for_owner(store: Store, token: str, watch: _Watch, say: Callable[[str], object]) -> None:
    """Wait until no other command seems to own the run.

    Raises RunConflict if another command is alive.
    """
    told = False
    while True:
        owner = read_owner(store)
        if owner is None or owner.token == token or owner.gone:
            return
        changed = watch.changed(_OWNER, owner)
        if watch.expired(_OWNER, owner):
            return
        # The other host's clock may be wrong. A claim that only seems fresh costs the user at most another try later.
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


# The claim is mutual exclusion without a compare-and-swap, which pyarrow offers for no bucket. The only requirement is
# that every host sees a file after its write has returned. A claimant announces itself in a file of its own, and writes
# `owner.json` only if it sees no other announcement. Of two claimants, the one that looks last sees either the other's
# announcement or the other's `owner.json`. The announcement of a killed command expires, so no lock has to be broken.


@contextlib.contextmanager
def _announced(store: Store, claimant: Owner, watch: _Watch) -> Iterator[bool]:
    """Announce a claimant and yield whether the claimant has no rival."""
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
            store.delete(name)  # a killed command left its announcement
    return False
