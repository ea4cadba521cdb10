"""Messages between workers, slots and the coordinator, in Ray calls."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from steadfast.guards.failures import FailureKind
from steadfast.plan import Amendments
from steadfast.run.events import Failure

Address = tuple[str, int]  # host, port


@dataclass(frozen=True)
class Member:
    """A worker process, as known to the coordinator."""

    name: str
    actor: Any  # actor handle, with which the coordinator can kill a silent worker
    node: str
    store: Address = ("", 0)  # address of a TCPStore in the worker, used if the worker leads the next world
    pid: int | None = None
    host: str | None = None


@dataclass(frozen=True)
class FailureReport:
    """Report of one worker about the end of its attempt.

    Each worker whose attempt breaks sends a report to the coordinator.
    """

    kind: FailureKind
    attempt: int  # 0 if the worker has not been in a world yet
    step: int
    message: str
    traceback: str
    skip: tuple[int, ...] = ()  # steps to leave out in the next attempts
    forward_size: int | None = None  # most samples of a forward in the next attempts
    corrupted: int | None = None  # rank that computed wrongly

    def to_event(self, member: str | None) -> Failure:
        """Return the event that records this failure of a worker."""
        return Failure(kind=self.kind, member=member, step=self.step, error=self.message, traceback=self.traceback)


@dataclass(frozen=True)
class WorldAssignment:
    """Place of a worker in the next world."""

    rank: int
    size: int
    attempt: int
    store: Address  # address of a TCPStore in the leader's process, which only this world uses
    amendments: Amendments

    @classmethod
    def of_line(cls, line: dict[str, Any]) -> Self:
        """Read an assignment from the result of `to_line`."""
        host, port = line["store"]
        amendments = Amendments.of_line(line["amendments"])
        return cls(line["rank"], line["size"], line["attempt"], (host, port), amendments)

    def to_line(self) -> dict[str, Any]:
        """Return the assignment as a JSON object."""
        return {**vars(self), "amendments": self.amendments.to_line()}


class Leave(StrEnum):
    """Reason why a worker gets no assignment.

    The coordinator answers a worker with the reason, and the worker returns it to its slot.
    """

    RUN_ENDED = "run ended"
    RELEASED = "released"  # only this worker is not needed, so another worker may take its slot
