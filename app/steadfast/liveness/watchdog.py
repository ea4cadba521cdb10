"""Detect hung and slow ranks without collectives, on any backend.

The training thread of each worker marks the phases that the thread enters. Every heartbeat reports the phases and the
progress of the worker's device. The other ranks wait for the rank with the least progress inside a collective, so only
that rank is timed.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from steadfast.liveness.verdicts import Guess
from steadfast.world.report import ProgressReport

_WAITS = ("gradients", "collective", "idle")  # phases in which a rank waits for the other ranks, or does nothing
_DEVICE = "device"  # stands for the time in which the device computes, summed over the microbatches of a step
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
    least_steps = min(num_steps)

    def step_s(member: str, phase: str) -> float:
        if phase == _DEVICE:
            return (after[member].device_s - before[member].device_s) / least_steps
        return (after[member].spent_s.get(phase, 0.0) - before[member].spent_s.get(phase, 0.0)) / least_steps

    # With a device the host's phases only measure how long the host launches work, so the device's time is compared.
    on_device = all(after[member].device_s for member in alike)
    computing = _DEVICE if on_device else "forward"
    loader_s = _excess({member: step_s(member, "loader") for member in alike})
    computing_s = _excess({member: step_s(member, computing) for member in alike})

    def lost_s(member: str) -> float:
        # Only these phases are a rank's own time. The rank may spend the rest of a step waiting for other ranks.
        parts = loader_s[member], computing_s[member]
        if on_device:  # the device's time includes its wait for the loader, so the two are not added
            return max(parts)
        return sum(parts)

    slowest = max(alike, key=lost_s)
    whole_s = sum(step_s(slowest, phase) for phase in after[slowest].spent_s)
    share = lost_s(slowest) / max(1e-9, whole_s)
    if share < least:
        return None
    phase = computing if computing_s[slowest] > loader_s[slowest] else "loader"
    return Straggler(slowest, after[slowest].rank, phase, round(lost_s(slowest), 4), round(share, 3))


def _excess(own_s: Mapping[str, float]) -> dict[str, float]:
    """Return each member's seconds above the median of the other members."""
    ordered = sorted(own_s.values())
    middle = (len(ordered) - 2) // 2, (len(ordered) - 1) // 2  # places of the median among the others
    excess_s: dict[str, float] = {}
    for member, seconds in own_s.items():
        own = bisect_left(ordered, seconds)
        low, high = (ordered[place + (place >= own)] for place in middle)
        excess_s[member] = seconds - (low + high) / 2
    return excess_s
