"""Rebuild a restarted coordinator's state from the workers that still run."""

import asyncio
import time

from steadfast.orchestration.messages import WorldAssignment
from steadfast.world.timeouts import Timeouts

_POLL_S = 0.05


class Succession:
    """Takeover of the current world by a new coordinator.

    The takeover is over when all members have rejoined, or when a time limit shows that the missing members are dead.

    Args:
        expected: whether a former coordinator has formed a world. If not, the takeover is over at once.
    """

    def __init__(self, timeouts: Timeouts, expected: bool) -> None:
        self.over = not expected
        self._timeouts = timeouts
        self._since_s = time.monotonic()  # time at which the first worker rejoined; before that, the time of the start
        self._places: dict[str, WorldAssignment] = {}  # last assignment of each worker that has rejoined
        self._idle: set[str] = set()  # workers that do not train, because they wait for a call to return

    @property
    def newest(self) -> WorldAssignment | None:
        """Return an assignment to the newest world that any worker reports."""
        return max(self._places.values(), key=lambda place: place.attempt, default=None)

    def came(self, name: str, place: WorldAssignment) -> None:
        """Record that a worker is alive, with its last assignment."""
        if not self._places:
            self._since_s = time.monotonic()
        self._places[name] = place

    def behind(self) -> list[str]:
        """Return the workers that train in a world before the newest one."""
        newest = self.newest
        if newest is None:
            return []
        others = self._idle.union(newest.members)
        return [name for name in self._places if name not in others]

    def broken(self) -> bool:
        """Return whether the newest world lacks a member that still lives.

        Such a member never received its assignment to the newest world, and so does not take part.
        """
        newest = self.newest
        if newest is None:
            return False
        for name in newest.members:
            place = self._places.get(name)
            if place is not None and place.attempt < newest.attempt:
                return True
        return False

    async def wait(self, idle: str | None) -> bool:
        """Wait until all members have rejoined, or the time limit has passed.

        Several calls may wait at the same time. Return whether this call ended the wait.

        Args:
            idle: name of a worker that does not train during this call, or None.
        """
        if idle is not None:
            self._idle.add(idle)
        while not self.over:
            if self._is_complete() or time.monotonic() - self._since_s > self._limit_s():
                self.over = True
                return True
            await asyncio.sleep(_POLL_S)
        return False

    def _is_complete(self) -> bool:
        newest = self.newest
        return newest is not None and set(newest.members) <= self._places.keys()

    def _limit_s(self) -> float:
        # While no member waits for a world, the members train, so all of them are alive. Once a member waits, the world
        # is broken, and a member that has not rejoined within `silence_s` is dead. Otherwise the limit is `lease_s`,
        # after which a worker without a coordinator ends.
        if self._places.keys() & self._idle:
            return self._timeouts.silence_s
        return self._timeouts.lease_s
