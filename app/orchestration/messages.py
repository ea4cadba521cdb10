"""Messages between workers, slots and the coordinator, as arguments and results of Ray calls."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from app.plan import Amendments

Address = tuple[str, int]  # host, port


@dataclass(frozen=True)
class Member:
    """A worker process, as it introduces itself to the coordinator."""

    name: str
    actor: Any  # by it the coordinator can kill a worker that has fallen silent
    node: str
    store: Address = ("", 0)  # of a TCPStore that the worker has opened, in case it leads the next world


@dataclass(frozen=True)
class FailureReport:
    """Why an attempt broke. Each worker that sees it break tells the coordinator."""

    # "peer" when another worker seems to be gone, "numeric" for a step to be left out, "smaller" where a forward has
    # run out of memory that may have fewer samples, "ours" for an error with a message of its own, "oom" for memory of
    # the device or the host elsewhere, "corruption" where a member has computed wrongly, "exception" for any other. The
    # coordinator makes "communication" of a "peer" if it misses nobody.
    kind: str
    attempt: int  # 0 for a worker that has been in no world yet
    step: int
    message: str
    traceback: str
    skip: tuple[int, ...] = ()  # steps to leave out from now on
    forward_size: int | None = None  # samples of the largest forward from now on
    corrupted: str = ""  # name of the member that has computed wrongly


@dataclass(frozen=True)
class WorldAssignment:
    """A place in the next world. The coordinator answers each worker of that world with one."""

    rank: int
    size: int
    attempt: int
    store: Address  # of a TCPStore in the leader's process, for this world alone
    amendments: Amendments
    members: tuple[str, ...]  # names of all workers of this world, by rank


class Leave(StrEnum):
    """Why a worker gets no assignment. The coordinator tells the worker, and the worker tells its slot."""

    RUN_ENDED = "run ended"
    RELEASED = "released"  # only this worker is not needed: another one may take its slot
