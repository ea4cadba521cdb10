"""Detect hung and slow ranks without collectives, on any backend.

The training thread of each worker marks the phases that the thread enters. Every heartbeat reports the phases and the
progress of the worker's device. The other ranks wait for the rank with the least progress inside a collective, so only
that rank is timed.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median

from steadfast.liveness.verdicts import Guess

_WAITS = ("gradients", "collective", "idle")  # phases in which a rank waits for the other ranks, or does nothing
_DEVICE = "device"  # stands for the time in which the device computes, summed over the microbatches of a step


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


Reports = Mapping[str, ProgressReport]  # by member


@dataclass(frozen=True)
class Hang:
    """World that is blocked by the members with the least progress."""

    members: tuple[str, ...]  # several if their progress is equal
    ranks: tuple[int, ...]
    phase: str
    step: int
    seconds: float
    waiting: tuple[str, ...]
    guess: Guess = Guess.STUCK
    usual_s: float = 0.0  # time that may be normal in this phase


class Watchdog:
    """Detector of hangs, from the progress that heartbeats report.

    Args:
        settled_s: seconds for which the same members must have the least progress before the members count as hung;
            longer than the time between two heartbeats.
    """

    def __init__(self, settled_s: float = 2.0) -> None:
        self._settled_s = settled_s
        self._least: tuple[int, ...] = ()
        self._first: Reports = {}  # reports of the last members, from the first look at which the members were last

    def look(self, reports: Reports) -> Hang | None:
        """Return the hang, None while no hang is certain.

        A world hangs if all members with the least progress exceed their limits.
        """
        if not reports:
            return None
        least = min(map(_place, reports.values()))
        last: dict[str, ProgressReport] = {}
        waiting: list[str] = []
        for member, report in reports.items():
            if _place(report) == least:
                last[member] = report
            else:
                waiting.append(member)
        # Reports are of different times: after a long wait, members with an older report seem to be last. So a member
        # counts as last only after the same members were last for a while.
        if least != self._least or last.keys() != self._first.keys():
            self._least = least
            self._first = last
        ranks = []
        for member, report in last.items():
            settled = report.seconds - self._first[member].seconds >= self._settled_s
            if not settled or report.limit_s is None or report.seconds <= report.limit_s:
                return None
            ranks.append(report.rank)
        one, *_ = last.values()
        seconds = min(report.seconds for report in last.values())
        usual_s = max(report.limit_s or 0.0 for report in last.values())
        guess = Guess.ALL_WAIT
        # A worker in its own code does not wait for another worker. If all workers are, each is slow by itself.
        if all(map(_is_in_own_code, reports.values())):
            guess = Guess.SLOW
        elif waiting:
            guess = Guess.STUCK
        return Hang(tuple(last), tuple(ranks), one.phase, one.step, seconds, tuple(waiting), guess, usual_s)


def _place(report: ProgressReport) -> tuple[int, ...]:
    # A member of an earlier attempt is behind all members of a later one, wherever it is in its step.
    return report.attempt, *report.position


def _is_in_own_code(report: ProgressReport) -> bool:
    if report.phase in _WAITS:
        return False
    is_in_collective = report.position[-1]
    return report.phase == "loader" or not is_in_collective


def own_s(before: ProgressReport, after: ProgressReport) -> float:
    """Return a worker's own seconds in a step, between two reports.

    At least one step must lie between the reports.
    """
    # The worker may spend the rest of a step waiting for other ranks. With a device the host's phases only measure how
    # long the host launches work. The device's time includes its wait for the loader, so the larger time counts.
    loader_s = after.spent_s.get("loader", 0.0) - before.spent_s.get("loader", 0.0)
    forward_s = after.spent_s.get("forward", 0.0) - before.spent_s.get("forward", 0.0)
    device_s = after.device_s - before.device_s
    seconds = max(loader_s, device_s) if after.device_s else loader_s + forward_s
    return seconds / (after.step - before.step)


@dataclass(frozen=True)
class Straggler:
    """Worker that makes the other workers wait in every step."""

    member: str
    rank: int
    phase: str  # the phase that loses most of the time
    lost_s: float  # seconds lost in a step
    share: float  # lost share of a step


def find_straggler(before: Reports, after: Reports, least: float = 0.1) -> Straggler | None:
    """Return the slowest worker, None if the loss is small.

    Args:
        before: reports of the earlier look.
        after: reports of the later look.
        least: least share of a step that a straggler costs.
    """
    alike = []
    num_steps = []
    for member, report in after.items():
        former = before.get(member)
        if former is not None and former.attempt == report.attempt:
            alike.append(member)
            num_steps.append(report.step - former.step)
    if len(alike) < 2 or min(num_steps) < 1:
        return None

    # With a device the host's phases only measure how long the host launches work, so the device's time is compared.
    on_device = all(after[member].device_s for member in alike)
    computing = _DEVICE if on_device else "forward"
    step_s: dict[str, defaultdict[str, float]] = {}  # member -> phase -> seconds in a step
    for member in alike:
        step_s[member] = defaultdict(float)
        for phase, spent_s in after[member].spent_s.items():
            step_s[member][phase] = (spent_s - before[member].spent_s.get(phase, 0.0)) / min(num_steps)
        step_s[member][_DEVICE] = (after[member].device_s - before[member].device_s) / min(num_steps)

    def excess_s(member: str, phase: str) -> float:
        return step_s[member][phase] - median(step_s[each][phase] for each in alike if each != member)

    def lost_s(member: str) -> float:
        # Only these phases are a rank's own time. The rank may spend the rest of a step waiting for other ranks.
        parts = excess_s(member, "loader"), excess_s(member, computing)
        if on_device:  # the device's time includes its wait for the loader, so the two are not added
            return max(parts)
        return sum(parts)

    slowest = max(alike, key=lost_s)
    whole_s = sum(seconds for phase, seconds in step_s[slowest].items() if phase != _DEVICE)
    share = lost_s(slowest) / max(1e-9, whole_s)
    if share < least:
        return None
    phase = max("loader", computing, key=partial(excess_s, slowest))
    return Straggler(slowest, after[slowest].rank, phase, round(lost_s(slowest), 4), round(share, 3))
