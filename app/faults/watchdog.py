"""Detect hung and slow ranks without using collectives, so that it works for any backend.

The training thread of each worker marks the phases that it enters, and every heartbeat reports them, with what its
device has done. The rank with the least progress makes the others wait for it inside a collective, so only it is timed.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median

from app.faults.verdicts import Guess
from app.world.progress import ProgressReport

_WAITS = ("gradients", "collective", "idle")  # phases in which a rank waits for the others, or does nothing
_DEVICE = "device"  # the phase in which it computes, of all microbatches of a step
Reports = Mapping[str, ProgressReport]  # by member


@dataclass(frozen=True)
class Hang:
    """A world that does not get on, because of the members that have come least far."""

    members: tuple[str, ...]  # several where they have come equally far
    ranks: tuple[int, ...]
    phase: str
    step: int
    seconds: float
    waiting: tuple[str, ...]
    guess: Guess = Guess.STUCK
    usual_s: float = 0.0  # what may well be ordinary in this phase


class Watchdog:
    """Finds hangs in what the workers of a world report, again and again.

    Args:
        settled_s: how long the same members must be last before they count as hung; longer than two heartbeats.
    """

    def __init__(self, settled_s: float = 2.0) -> None:
        self._settled_s = settled_s
        self._least: tuple[int, ...] = ()
        self._first: Reports = {}  # from the last members, when they turned out to be the last

    def look(self, reports: Reports) -> Hang | None:
        """Return the hang, if all members of the world that have come least far are beyond their limits."""
        if not reports:
            return None
        places = {member: (report.attempt, *report.position) for member, report in reports.items()}
        least = min(places.values())
        last = {member: reports[member] for member in reports if places[member] == least}
        # Reports are not of one moment: when a long wait is over, those who have not reported it yet look like the
        # last. So nobody counts as last before the same members have been for a while.
        if least != self._least or last.keys() != self._first.keys():
            self._least = least
            self._first = last
        ranks = []
        for member, report in last.items():
            settled = report.seconds - self._first[member].seconds >= self._settled_s
            if not settled or report.limit_s is None or report.seconds <= report.limit_s:
                return None
            ranks.append(report.rank)
        one = next(iter(last.values()))
        seconds = min(report.seconds for report in last.values())
        waiting = tuple(member for member in reports if member not in last)
        usual_s = max(report.limit_s or 0.0 for report in last.values())
        guess = _guess(reports, bool(waiting))
        return Hang(tuple(last), tuple(ranks), one.phase, one.step, seconds, waiting, guess, usual_s)


def _guess(reports: Reports, behind: bool) -> Guess:
    # Whoever is in code of its own waits for nobody. If that is all of them, they are slow, each by itself.
    if all(_is_in_own_code(report) for report in reports.values()):
        return Guess.SLOW
    return Guess.STUCK if behind else Guess.ALL_WAIT


def _is_in_own_code(report: ProgressReport) -> bool:
    if report.phase in _WAITS:
        return False
    is_in_collective = report.position[-1]
    return report.phase == "loader" or not is_in_collective


def own_s(before: ProgressReport, after: ProgressReport) -> float:
    """Return the seconds of a step that a worker spends by itself, between two reports that a step lies between."""
    # What is left of a step it may have spent waiting for others. On a device, which waits for the loader too, a host's
    # phases last as long as it launches the work of each.
    loader_s = after.spent_s.get("loader", 0.0) - before.spent_s.get("loader", 0.0)
    forward_s = after.spent_s.get("forward", 0.0) - before.spent_s.get("forward", 0.0)
    device_s = after.device_s - before.device_s
    return (max(loader_s, device_s) if after.device_s else loader_s + forward_s) / (after.step - before.step)


@dataclass(frozen=True)
class Straggler:
    """A worker that the others wait for in every step."""

    member: str
    rank: int
    phase: str  # in which most of the time is lost
    lost_s: float  # in a step
    share: float  # of a step


def find_straggler(before: Reports, after: Reports, least: float = 0.1) -> Straggler | None:
    """Return the slowest worker between two looks at a world, if that costs at least the share `least` of a step."""
    alike = []
    num_steps = []
    for member, report in after.items():
        former = before.get(member)
        if former is not None and former.attempt == report.attempt:
            alike.append(member)
            num_steps.append(report.step - former.step)
    if len(alike) < 2 or min(num_steps) < 1:
        return None

    # On a device a host's phases last as long as it launches the work of each.
    on_device = all(after[member].device_s for member in alike)
    own = ("loader", _DEVICE if on_device else "forward")
    step_s: dict[str, defaultdict[str, float]] = {}  # member -> phase -> seconds in a step
    for member in alike:
        step_s[member] = defaultdict(float)
        for phase, spent_s in after[member].spent_s.items():
            step_s[member][phase] = (spent_s - before[member].spent_s.get(phase, 0.0)) / min(num_steps)
        step_s[member][_DEVICE] = (after[member].device_s - before[member].device_s) / min(num_steps)

    def excess_s(member: str, phase: str) -> float:
        return step_s[member][phase] - median(step_s[each][phase] for each in alike if each != member)

    def lost_s(member: str) -> float:
        # Only these are a rank's own time. What is left of a step, it may have spent waiting for others.
        if on_device:  # which waits for the loader too
            return max(excess_s(member, "loader"), excess_s(member, _DEVICE))
        return excess_s(member, "loader") + excess_s(member, "forward")

    slowest = max(alike, key=lost_s)
    whole_s = sum(seconds for phase, seconds in step_s[slowest].items() if phase != _DEVICE)
    share = lost_s(slowest) / max(1e-9, whole_s)
    if share < least:
        return None
    phase = max(own, key=partial(excess_s, slowest))
    return Straggler(slowest, after[slowest].rank, phase, round(lost_s(slowest), 4), round(share, 3))
