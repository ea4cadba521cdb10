"""Progress of a worker, for the coordinator, which imports this module without torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ProgressReport:
    """Progress of a worker in a heartbeat.

    A report is small, because it is sent as JSON.
    """

    attempt: int
    rank: int
    position: list[int]  # comparable among the workers of an attempt, whatever their shares
    step: int  # the last finished step; 0 until the attempt has restored one
    phase: str
    seconds: float  # in this phase so far
    limit_s: float | None  # for this phase; None for no limit
    spent_s: dict[str, float]  # by phase, in this attempt, completed phases only
    # Seconds of work on the device in this attempt, from each step's first forward to its last backward. There a phase
    # ends as soon as the host has launched its work, so its own duration says little.
    device_s: float = 0.0
    reading: str = ""  # samples that this worker waits for, as in `Loader.reading`
