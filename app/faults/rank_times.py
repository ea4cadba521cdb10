"""Compare what a step costs each rank by itself, from what heartbeats tell anyway."""

from statistics import fmean

from app.faults.watchdog import Reports, own_s
from app.run import events
from app.world.progress import ProgressReport

_LOOK_S = 5.0
_FIRST_S = 20.0  # after which an attempt's times are told for the first time
_RAREST_S = 3600.0


class RankTimes:
    """Looks at the ranks of a world every few seconds, and tells ever more rarely what it has seen."""

    def __init__(self) -> None:
        self._attempt = 0
        self._told: Reports = {}  # when the times were last told, or each had done a step; empty before
        self._seen: Reports = {}  # at the last look
        self._last: list[int] = []  # by rank: at how many looks since then it was the slowest
        self._seen_s = 0.0
        self._tell_s = 0.0
        self._interval_s = 0.0

    def look(self, world: Reports, now_s: float) -> events.RankTimes | None:
        """Take the newest reports of all members of a world. Return what there is to tell, which is rare."""
        attempt = next(iter(world.values())).attempt
        if attempt != self._attempt:
            self._attempt = attempt
            self._told = {}
        if not self._told:
            if all(_has_done_a_step(report) for report in world.values()):
                self._begin(world, now_s)
            return None
        if len(world) == 1:
            return None
        if now_s - self._seen_s < _LOOK_S or _fewest_steps(self._seen, world) < 1:
            return None
        slowest = max(world, key=lambda member: own_s(self._seen[member], world[member]))
        self._last[world[slowest].rank] += 1
        self._seen, self._seen_s = world, now_s
        if now_s < self._tell_s:
            return None
        return self._tell(world, now_s)

    def _begin(self, world: Reports, now_s: float) -> None:
        self._interval_s = _FIRST_S
        self._count_from(world, now_s)

    def _count_from(self, world: Reports, now_s: float) -> None:
        self._told = self._seen = world
        self._seen_s = now_s
        self._tell_s = now_s + self._interval_s
        self._last = [0] * len(world)

    def _tell(self, world: Reports, now_s: float) -> events.RankTimes:
        num_steps = round(fmean(report.step - self._told[member].step for member, report in world.items()))
        own_ms: dict[int, float] = {}
        for member, report in world.items():
            own_ms[report.rank] = round(1e3 * own_s(self._told[member], report), 3)
        told = events.RankTimes(
            attempt=self._attempt,
            step=min(report.step for report in world.values()),
            num_steps=num_steps,
            own_ms=tuple(own_ms[rank] for rank in sorted(own_ms)),
            last=tuple(self._last),
        )
        self._interval_s = min(2 * self._interval_s, _RAREST_S)
        self._count_from(world, now_s)
        return told


def _has_done_a_step(report: ProgressReport) -> bool:
    # Before it has, nobody knows which step the attempt began with.
    return "update" in report.spent_s


def _fewest_steps(before: Reports, after: Reports) -> int:
    return min(report.step - before[member].step for member, report in after.items())
