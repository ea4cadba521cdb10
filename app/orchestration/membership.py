"""Decide who is in the world. Pure bookkeeping that is told the time, so tables test every rule without a cluster."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from app.orchestration.seating import seat


@dataclass(frozen=True)
class Form:
    """Make these members the world, in the order of their ranks."""

    members: tuple[str, ...]


@dataclass(frozen=True)
class Resize:
    """Ask the world under way to end at a step that its members agree on."""

    none_stays: bool = False  # nobody in it will be in the next one, so what they hold must be written down


@dataclass(frozen=True)
class Wait:
    """Decide again after so many seconds, if nothing happens before."""

    seconds: float


@dataclass(frozen=True)
class Keep:
    """Do nothing until somebody joins or is lost."""


@dataclass(frozen=True)
class Short:
    """Wait for `missing` more members: all who are left wait, and they are too few for a world."""

    missing: int


Decision = Form | Resize | Wait | Keep | Short


@dataclass
class Membership:
    """The members of a run: those in the world under way, and those who wait for the next one."""

    smallest: int  # of the sizes that a world may have
    largest: int
    expected: int  # so many are coming when a run starts, or when all members are lost
    # How long the first world waits for the rest of them, and how long a newcomer waits for others. The world under way
    # goes on meanwhile, and two who come together cost one resize.
    settle_s: float
    gather_s: float
    spares: int = 0  # so many more than `largest` may wait beside the world, to take the place of one that is lost
    unit: int = 1  # members of a replica: a world is made of whole ones
    world: tuple[str, ...] = ()
    _leaving: set[str] = field(default_factory=set)  # in the world, and not to be in the next one
    _waiting: dict[str, float] = field(default_factory=dict)  # member -> since when, in the order of arrival
    _nodes: dict[str, str] = field(default_factory=dict)  # of each member
    _ranks: dict[str, int] = field(default_factory=dict)  # in the newest world, of those who are still members

    def __post_init__(self) -> None:
        self._bound(self.smallest, self.largest)

    def _bound(self, smallest: int, largest: int) -> None:
        self.smallest = -(-smallest // self.unit) * self.unit
        self.largest = largest // self.unit * self.unit
        self.expected = max(self.smallest, min(self.expected, self.largest) // self.unit * self.unit)

    def begin(self, world: tuple[str, ...]) -> None:
        """Take note of the world that is under way from now on, in the order of ranks."""
        self.world = world
        self._ranks = {member: rank for rank, member in enumerate(world)}

    @property
    def wanted(self) -> int:
        """Return how many members there are to be, spares included."""
        return self.largest + self.spares

    def join(self, member: str, now_s: float, node: str = "") -> bool:
        """Let `member` wait for the next world; if it was in the world, it has left it. False if it is to go."""
        if member in self._leaving:
            self._remove(member)
            return False
        self._waiting[member] = now_s
        self._nodes[member] = node
        return True

    def lose(self, member: str) -> bool:
        """Remove `member`, which has not gone as it was asked to. Return whether the world under way counted on it."""
        was_in = self._remove(member)
        if self._leaving >= set(self.world):
            # Those who were to stay are gone, and with those who were to leave the state would be lost.
            self._leaving.difference_update(self.world[: self.largest])
        return was_in

    def _remove(self, member: str) -> bool:
        was_in = member in self.world
        self._waiting.pop(member, None)
        self._nodes.pop(member, None)
        self._ranks.pop(member, None)
        self._leaving.discard(member)
        self.world = tuple(each for each in self.world if each != member)
        return was_in

    def send_away(self, members: Iterable[str]) -> list[str]:
        """Let `members` go: those in the world at an agreed step. Return those who wait, and may go at once."""
        going = set(members)
        waiting = sorted(going & self._waiting.keys())
        for member in waiting:
            self._remove(member)
        self._leaving |= going & set(self.world)
        return waiting

    def rescale(self, smallest: int, largest: int) -> list[str]:
        """Set other bounds. The last ranks go where there are too many; returns as `send_away` does.

        Of those who wait, as many stay as there may be spares.
        """
        self._bound(smallest, largest)
        staying = [member for member in self._candidates() if member not in self._leaving]
        surplus = [member for member in staying[self.largest :] if member in self.world]
        waiting = [member for member in staying[self.largest :] if member not in self.world]
        return self.send_away(surplus + waiting[self.spares :])

    def close(self) -> list[str]:
        """Let nobody in any more; returns as `send_away` does."""
        # Those in the world, and those who survived it, are to write down what they hold, however few they are.
        self._bound(1, max(self.unit, len(self.world)))
        if len(self.world) < self.unit:  # and cannot, as less than a replica
            return self.send_away(self._candidates())
        return self.send_away(self._newcomers())

    def decide(self, now_s: float) -> Decision:
        """Return what to do now. `Form` takes effect at once."""
        if not set(self.world) <= self._waiting.keys():
            return self._for_a_change(now_s)
        candidates = self._candidates()
        size = min(self.largest, len(candidates) // self.unit * self.unit)
        if size < self.smallest:
            return Short(self.smallest - len(candidates))
        # Survivors form a world at once: whoever comes later joins by a resize, while training goes on.
        if not self.world and size < self.expected:
            left_s = min(self._waiting.values()) + self.settle_s - now_s
            if left_s > 0:
                return Wait(left_s)
        self.begin(tuple(seat(candidates, self._ranks, self._nodes, self.unit, size // self.unit)))
        for member in self.world:
            del self._waiting[member]
        return Form(self.world)

    def _for_a_change(self, now_s: float) -> Decision:
        num_staying = len(self.world) - len(self._leaving)
        if self._leaving:
            return Resize(none_stays=num_staying == 0)
        newcomers = self._newcomers()
        size = min(self.largest, (num_staying + len(newcomers)) // self.unit * self.unit)
        if size <= num_staying:
            return Keep()
        left_s = max(self._waiting[member] for member in newcomers) + self.gather_s - now_s
        if left_s > 0:
            return Wait(left_s)
        return Resize()

    def _candidates(self) -> tuple[str, ...]:
        # Survivors first and in their order, so that the leader stays where it is.
        return (*self.world, *self._newcomers())

    @property
    def left_over(self) -> int:
        """Return how many members wait beside the world, and would make no whole replica."""
        return len(self._newcomers()) % self.unit

    def _newcomers(self) -> list[str]:
        return [member for member in self._waiting if member not in self.world]
