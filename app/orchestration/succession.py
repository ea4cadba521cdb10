"""What a coordinator learns from workers that a former one has left behind."""

import asyncio
import time

from app.orchestration.messages import WorldAssignment
from app.world.timeouts import Timeouts

_POLL_S = 0.05


class Succession:
    """Wait until all members of the world under way have come, or it is clear that some will not.

    Args:
        expected: whether a former coordinator has formed a world. If not, there is nothing to wait for.
    """

    def __init__(self, timeouts: Timeouts, expected: bool) -> None:
        self.over = not expected
        self._timeouts = timeouts
        self._since_s = time.monotonic()  # the first worker has come, or this has begun
        self._places: dict[str, WorldAssignment] = {}  # the last one of each who has come
        self._idle: set[str] = set()  # who do not train, but wait for this to be over

    @property
    def newest(self) -> WorldAssignment | None:
        """Return a place in the newest world that anybody was told of."""
        return max(self._places.values(), key=lambda place: place.attempt, default=None)

    def came(self, name: str, place: WorldAssignment) -> None:
        """Take note that a worker lives, and where it was last."""
        if not self._places:
            self._since_s = time.monotonic()
        self._places[name] = place

    def behind(self) -> list[str]:
        """Return those who train in an earlier world than the newest."""
        newest = self.newest
        names = newest.members if newest else ()
        return [name for name in self._places if name not in names and name not in self._idle]

    def broken(self) -> bool:
        """Return whether some of the newest world were never told that they are in it, and so do not take part."""
        newest = self.newest
        if newest is None:
            return False
        known = [self._places[name] for name in newest.members if name in self._places]
        return any(place.attempt < newest.attempt for place in known)

    async def wait(self, idle: str | None) -> bool:
        """Wait until it is known who lives. Return whether this call is the one that found it out."""
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
        # While none of the world's members waits they train, and so all of them live. Once one waits, whoever has not
        # come by then has died. If nobody has come at all, the last of them gives up after this time.
        if self._places.keys() & self._idle:
            return self._timeouts.silence_s
        return self._timeouts.lease_s
