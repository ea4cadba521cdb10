"""Who is in the world. Pure bookkeeping that is told the time, so every rule is tested with a table and no cluster."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Form:
    """Make these members the world, in the order of their ranks."""

    members: tuple[str, ...]


@dataclass(frozen=True)
class Resize:
    """Ask the world under way to end at a step that its members agree on.

    none_stays: nobody in it will be in the next one, so what they hold must be written down.
    """

    none_stays: bool = False


@dataclass(frozen=True)
class Wait:
    """Decide again after so many seconds, if nothing happens before."""

    seconds: float


@dataclass(frozen=True)
class Keep:
    """Nothing to do until somebody joins or is lost."""


@dataclass(frozen=True)
class Short:
    """Too few are left for a world, and all who are left wait: `missing` more have to come."""

    missing: int


Decision = Form | Resize | Wait | Keep | Short


@dataclass
class Membership:
    """The members of a run: those in the world under way, and those who wait for the next one.

    Args:
        smallest, largest: how many members a world may have.
        expected: so many are coming when a run starts, or when all members are lost.
        settle_s: how long the first world waits for the rest of them.
        gather_s: how long a newcomer waits for others, so that two who come together cost one resize. The world under
            way goes on meanwhile.
    """

    smallest: int
    largest: int
    expected: int
    settle_s: float
    gather_s: float
    world: tuple[str, ...] = ()
    _leaving: set[str] = field(default_factory=set)
    _waiting: dict[str, float] = field(default_factory=dict)  # member -> since when

    def join(self, member: str, now_s: float) -> bool:
        """`member` is ready for the next world; one that was in the world has left it. False if it is to go."""
        if member in self._leaving:
            self.lose(member)
            return False
        self._waiting[member] = now_s
        return True

    def lose(self, member: str) -> bool:
        """`member` is gone. True if the world under way counted on it."""
        self._waiting.pop(member, None)
        self._leaving.discard(member)
        was_in = member in self.world
        self.world = tuple(each for each in self.world if each != member)
        return was_in

    def send_away(self, members: Iterable[str]) -> list[str]:
        """`members` are to go: those in the world at an agreed step. Returns those who wait, and may go at once."""
        members = set(members)
        waiting = [member for member in self._waiting if member in members]
        for member in waiting:
            self.lose(member)
        self._leaving |= members & set(self.world)
        return waiting

    def rescale(self, smallest: int, largest: int) -> list[str]:
        """Other bounds. The last ranks go where there are too many; returns as `send_away` does."""
        self.smallest, self.largest = smallest, largest
        self.expected = max(smallest, min(self.expected, largest))
        staying = [member for member in (*self.world, *self._newcomers()) if member not in self._leaving]
        return self.send_away(staying[largest:])

    def close(self) -> list[str]:
        """Nobody new any more: those in the world, and those who survived it, are to write down what they hold, however
        few they are. Returns as `send_away` does."""
        self.smallest, self.largest = 1, max(1, len(self.world))
        return self.send_away(self._newcomers())

    def decide(self, now_s: float) -> Decision:
        """What to do now; `Form` takes effect at once."""
        if any(member not in self._waiting for member in self.world):
            return self._for_a_change(now_s)
        ready = (*self.world, *self._newcomers())[: self.largest]  # survivors first, so the leader stays if it can
        if len(ready) < self.smallest:
            return Short(self.smallest - len(ready))
        if not self.world and len(ready) < self.expected:
            left_s = min(self._waiting.values()) + self.settle_s - now_s
            if left_s > 0:
                return Wait(left_s)
        self.world = ready
        for member in ready:
            del self._waiting[member]
        return Form(ready)

    def _for_a_change(self, now_s: float) -> Decision:
        staying = len(self.world) - len(self._leaving)
        if self._leaving:
            return Resize(none_stays=staying == 0)
        since = [self._waiting[member] for member in self._newcomers()]
        if not since or staying >= self.largest:
            return Keep()
        left_s = max(since) + self.gather_s - now_s
        return Wait(left_s) if left_s > 0 else Resize()

    def _newcomers(self) -> list[str]:
        return [member for member in self._waiting if member not in self.world]
