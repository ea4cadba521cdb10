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
        attempt: newest attempt on storage.
        world: workers of this attempt by rank, () if storage could not be read.
    """

    def __init__(self, timeouts: Timeouts, expected: bool, attempt: int = 0, world: tuple[str, ...] = ()) -> None:
        self.over = not expected
        self._attempt = attempt
        self._world = world
        self._timeouts = timeouts
        self._since_s = time.monotonic()  # time at which the first worker rejoined; before that, the time of the start
        self.newest: WorldAssignment | None = None  # an assignment to the newest world that any worker reports
        self._places: dict[str, WorldAssignment] = {}  # last assignment of each worker that has rejoined
        self._idle: set[str] = set()  # workers that do not train, because they wait for a call or a place
        self._ended: asyncio.Future[None] | None = None  # done once the wait ends

    def came(self, name: str, place: WorldAssignment) -> None:
        """Record that a worker is alive, with its last assignment."""
        if not self._places:
            self._since_s = time.monotonic()
        self._places[name] = place
        if self.newest is None or place.attempt > self.newest.attempt:
            self.newest = place

    def world(self) -> tuple[str, ...]:
        """Return the members of the newest world by rank, () if no worker has rejoined."""
        if self.newest is None:
            return ()
        if self._world and self.newest.attempt == self._attempt:
            return self._world
        names = {place.rank: name for name, place in self._places.items() if place.attempt == self.newest.attempt}
        # Storage does not name the others, so placeholders stand for them, and a late member is refused.
        return tuple(names.get(rank, f"of rank {rank}") for rank in range(self.newest.size))

    def behind(self) -> list[str]:
        """Return the workers that train in a world before the newest one."""
        others = self._idle.union(self.world())
        return [name for name in self._places if name not in others]

    def broken(self) -> bool:
        """Return whether the newest world lacks a member that still lives.

        Such a member never received its assignment to the newest world, and so does not take part.
        """
        if self.newest is None:
            return False
        newest = self.newest.attempt
        members = set(self.world())
        return any(place.attempt < newest for name, place in self._places.items() if name in members)

    async def wait(self, idle: str | None) -> bool:
        """Wait until all members have rejoined, or the time limit has passed.

        Several calls may wait at the same time. Return whether this call ended the wait.

        Args:
            idle: name of a worker that does not train during this call, or None.
        """
        if idle is not None:
            self._idle.add(idle)
        # One task looks for all calls that wait, because each worker may have one.
        if self._ended is None:
            self._ended = asyncio.ensure_future(self._end())
        await asyncio.shield(self._ended)
        is_first = not self.over
        self.over = True
        return is_first

    async def _end(self) -> None:
        while not self._is_whole():
            if time.monotonic() - self._since_s > self._limit_s():
                break
            await asyncio.sleep(_POLL_S)

    def _is_whole(self) -> bool:
        return self.newest is not None and all(name in self._places for name in self.world())

    def _limit_s(self) -> float:
        # While no member waits for a world, the members train, so all of them are alive. Once a member waits, the world
        # is broken, and a member that has not rejoined within `silence_s` is dead. Otherwise the limit is `lease_s`,
        # after which a worker without a coordinator ends.
        if self._places.keys() & self._idle:
            return self._timeouts.silence_s
        return self._timeouts.lease_s
