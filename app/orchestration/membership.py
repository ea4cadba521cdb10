"""Who is in the world. Pure bookkeeping that is told the time, so every rule is tested with a table and no cluster."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Form:
    """Make these members the world, in the order of their ranks."""

    members: tuple[str, ...]


@dataclass(frozen=True)
class Resize:
    """Ask the world under way to end at a step that its members agree on; newcomers wait for it."""


@dataclass(frozen=True)
class Wait:
    """Decide again after so many seconds, if nothing happens before."""

    seconds: float


@dataclass(frozen=True)
class Keep:
    """Nothing to do until somebody joins or is lost."""


Decision = Form | Resize | Wait | Keep


@dataclass
class Membership:
    """The members of a run: those in the world under way, and those who wait for the next one.

    Args:
        smallest: a world has at least so many members.
        expected: so many are coming when a run starts, or when all members are lost.
        settle_s: how long the first world waits for the rest of them.
        gather_s: how long a newcomer waits for others, so that two who come together cost one resize. The world under
            way goes on meanwhile.
    """

    smallest: int
    expected: int
    settle_s: float
    gather_s: float
    world: tuple[str, ...] = ()
    _waiting: dict[str, float] = field(default_factory=dict)  # member -> since when

    def join(self, member: str, now_s: float) -> None:
        """`member` is ready for the next world; one that was in the world has left it."""
        self._waiting[member] = now_s

    def lose(self, member: str) -> bool:
        """`member` is gone. True if the world under way counted on it."""
        self._waiting.pop(member, None)
        was_in = member in self.world
        self.world = tuple(each for each in self.world if each != member)
        return was_in

    def decide(self, now_s: float) -> Decision:
        """What to do now; `Form` takes effect at once."""
        if any(member not in self._waiting for member in self.world):
            return self._for_newcomers(now_s)
        if len(self._waiting) < self.smallest:
            return Keep()
        if not self.world and len(self._waiting) < self.expected:
            left_s = min(self._waiting.values()) + self.settle_s - now_s
            if left_s > 0:
                return Wait(left_s)
        newcomers = [member for member in self._waiting if member not in self.world]
        self.world = (*self.world, *newcomers)  # survivors keep their order, so the leader stays if it can
        self._waiting.clear()
        return Form(self.world)

    def _for_newcomers(self, now_s: float) -> Decision:
        since = [since for member, since in self._waiting.items() if member not in self.world]
        if not since:
            return Keep()
        left_s = max(since) + self.gather_s - now_s
        return Wait(left_s) if left_s > 0 else Resize()
