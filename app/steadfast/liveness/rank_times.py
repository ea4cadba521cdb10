"""Compare each rank's own time in a step, from heartbeats."""

from statistics import fmean

from steadfast.liveness.watchdog import Reports, own_s
from steadfast.run import events

_LOOK_S = 5.0
_FIRST_S = 20.0  # seconds until the first report of an attempt; each later interval is twice as long
_RAREST_S = 3600.0


class RankTimes:
    """Reporter of the ranks' times, at growing intervals."""

    def __init__(self) -> None:
        self._attempt = 0
        self._told: Reports = {}  # heartbeats at the last report, or at the first look of the attempt
        self._seen: Reports = {}  # heartbeats at the last look
        self._last: list[int] = []  # by rank: the number of looks since the last report at which the rank was slowest
        self._seen_s = 0.0
        self._tell_s = 0.0
        self._interval_s = 0.0

    def look(self, world: Reports, now_s: float) -> events.RankTimes | None:
        """Compare the newest heartbeats and return an event when due.

        Args:
            world: newest heartbeat of every member of the world.
        """
        attempt = next(iter(world.values())).attempt
        # A member reports step 0 until it has restored a state, so steps cannot be counted from its earlier reports.
        if attempt != self._attempt or not all(report.step for report in self._seen.values()):
            self._begin(attempt, world, now_s)
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

    def _begin(self, attempt: int, world: Reports, now_s: float) -> None:
        self._attempt = attempt
        self._interval_s = _FIRST_S
        self._count_from(world, now_s)

    def _count_from(self, world: Reports, now_s: float) -> None:
        self._told = self._seen = world
        self._seen_s = now_s
        self._tell_s = now_s + self._interval_s
        self._last = [0] * len(world)

    def _tell(self, world: Reports, now_s: float) -> events.RankTimes:
        num_steps = round(fmean(report.step - self._told[member].step for member, report in world.items()))
        own_ms = []
        for member in sorted(world, key=lambda member: world[member].rank):
            own_ms.append(round(1e3 * own_s(self._told[member], world[member]), 3))
        told = events.RankTimes(
            attempt=self._attempt,
            step=min(report.step for report in world.values()),
            num_steps=num_steps,
            own_ms=tuple(own_ms),
            last=tuple(self._last),
        )
        # Reports at a constant interval would fill the events of a long run.
        self._interval_s = min(2 * self._interval_s, _RAREST_S)
        self._count_from(world, now_s)
        return told


def _fewest_steps(before: Reports, after: Reports) -> int:
    return min(report.step - before[member].step for member, report in after.items())
