"""Decide which members form the next world.

The module is pure and receives the time as an argument, so that tests need no cluster.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

from steadfast.config import Layout, ScalingConfig
from steadfast.orchestration.seating import seat

_SETTLE_S = 5.0  # time that the first world waits for the remaining workers that the cluster has room for
_GATHER_S = 0.3  # time that a new worker waits, so that several new workers cause one resize


@dataclass(frozen=True)
class Form:
    """Decision to form a world of these members, in the order of their ranks."""

    members: tuple[str, ...]


@dataclass(frozen=True)
class Resize:
    """Decision to end the current world at a step that its ranks agree on."""

    none_stays: bool = False  # if no member stays, the members must write their state to storage first


@dataclass(frozen=True)
class Wait:
    """Decision to wait for `seconds`, or until a change."""

    seconds: float


@dataclass(frozen=True)
class Keep:
    """Decision to do nothing until a member joins or is lost."""


@dataclass(frozen=True)
class Short:
    """Decision to wait for `missing` more members.

    A world needs more members than there are.
    """

    missing: int


Decision = Form | Resize | Wait | Keep | Short


@dataclass
class Membership:
    """Members of a run, in the current world or waiting."""

    smallest: int  # smallest size of a world
    largest: int  # largest size of a world
    expected: int  # members that are coming when a run starts, or when all members are lost
    # The first world waits `settle_s` for the expected members. A new member waits `gather_s` for more new members,
    # while the current world goes on, so that several new members cause one resize.
    settle_s: float
    gather_s: float
    spares: int = 0  # members beyond `largest` that may wait to replace a lost member
    # Returns the layout that trains on most of a number of members. A world consists of whole replicas.
    layout: Callable[[int], Layout] = Layout
    world: tuple[str, ...] = ()
    _leaving: set[str] = field(default_factory=set)  # members of the world that shall not be in the next one
    _waiting: dict[str, float] = field(default_factory=dict)  # member -> time of arrival, in this order
    _new: dict[str, float] = field(default_factory=dict)  # the part of `_waiting` that is not in the world
    _nodes: dict[str, str] = field(default_factory=dict)  # member -> its node
    _ranks: dict[str, int] = field(default_factory=dict)  # remaining member of the newest world -> its rank there
    _replica_size: int = 1  # members of a replica in the newest world

    @classmethod
    def of(cls, scaling: ScalingConfig, expected: int, layout: Callable[[int], Layout] = Layout) -> Self:
        """Return the membership of a run that starts.

        Args:
            expected: number of workers that the cluster has room for.
        """
        return cls(*scaling.num_workers, expected, _SETTLE_S, _GATHER_S, scaling.spares, layout)

    def __post_init__(self) -> None:
        self._bound(self.smallest, self.largest)

    def _bound(self, smallest: int, largest: int) -> None:
        # A world consists of whole replicas, so a lower bound is rounded up and an upper bound down.
        while self._usable(smallest) < smallest:
            smallest += 1
        self.smallest = smallest
        self.largest = self._usable(largest)
        self.expected = max(self.smallest, self._usable(min(self.expected, self.largest)))

    def _usable(self, num_members: int) -> int:
        """Return the size of the largest world of `num_members` members."""
        return self.layout(num_members).size

    @property
    def smallest_replica(self) -> int:
        """Return the smallest number of members that hold a whole state."""
        return next(number for number in itertools.count(1) if self._usable(number))

    def begin(self, world: tuple[str, ...]) -> None:
        """Set the current world, with its members in the order of ranks."""
        self.world = world
        self._replica_size = self.layout(len(world)).replica_size
        self._ranks = {member: rank for rank, member in enumerate(world)}
        self._new = {member: since_s for member, since_s in self._waiting.items() if member not in self._ranks}

    def rank_of(self, member: str) -> int | None:
        """Return a member's rank in the newest world, None if it has none."""
        return self._ranks.get(member)

    @property
    def wanted(self) -> int:
        """Return the wanted number of members, including spares."""
        return self.largest + self.spares

    def join(self, member: str, now_s: float, node: str = "") -> bool:
        """Make `member` wait for the next world.

        Return False if the member must end. A member of the current world that joins again has left that world.
        """
        if member in self._leaving:
            self._remove(member)
            return False
        self._waiting[member] = now_s
        if member not in self._ranks:
            self._new[member] = now_s
        self._nodes[member] = node
        return True

    def lose(self, member: str) -> bool:
        """Remove a lost member. Return whether the member was in the current world."""
        was_in = self._remove(member)
        if len(self._leaving) >= len(self.world) and self._leaving >= set(self.world):
            # All members that were to stay are lost. The leaving ones stay instead, because the state would be lost
            # with them.
            self._leaving.difference_update(self.world[: self.largest])
        return was_in

    def _remove(self, member: str) -> bool:
        was_in = member in self._ranks
        self._waiting.pop(member, None)
        self._new.pop(member, None)
        self._nodes.pop(member, None)
        self._ranks.pop(member, None)
        self._leaving.discard(member)
        if was_in:
            self.world = tuple(each for each in self.world if each != member)
        return was_in

    def send_away(self, members: Iterable[str]) -> list[str]:
        """Remove the waiting members among `members`, and return their names.

        The caller dismisses the removed members. Members of the world are only marked, and leave at an agreed step.
        """
        going = set(members)
        waiting = sorted(going & self._waiting.keys())
        for member in waiting:
            self._remove(member)
        self._leaving |= going & set(self.world)
        return waiting

    def rescale(self, smallest: int, largest: int) -> list[str]:
        """Set other bounds, and release surplus members as `send_away` does.

        The last ranks of the world are released first. Waiting members stay as spares, up to the number of spares.
        """
        self._bound(smallest, largest)
        staying = [member for member in self._candidates() if member not in self._leaving]
        surplus: list[str] = []
        waiting: list[str] = []
        for member in staying[self.largest :]:
            if member in self._ranks:
                surplus.append(member)
            else:
                waiting.append(member)
        return self.send_away(surplus + waiting[self.spares :])

    def close(self) -> list[str]:
        """Admit no new members, and release waiting ones as `send_away` does."""
        # Members of the world, and its survivors, must still write their state to storage, however few they are.
        self._bound(1, max(self.smallest_replica, len(self.world)))
        if len(self.world) < self.smallest_replica:  # less than one replica does not hold a whole state
            return self.send_away(self._candidates())
        return self.send_away(self._new)

    def decide(self, now_s: float) -> Decision:
        """Return the current decision. `Form` takes effect at once."""
        num_candidates = len(self.world) + len(self._new)
        if len(self._waiting) < num_candidates:  # a member of the world has not come back
            return self._for_a_change(now_s)
        size = self._usable(min(self.largest, num_candidates))
        if size < self.smallest:
            return Short(self.smallest - num_candidates)
        # Survivors form a world at once. A later member joins by a resize, while training goes on.
        if not self.world and size < self.expected:
            left_s = min(self._waiting.values()) + self.settle_s - now_s
            if left_s > 0:
                return Wait(left_s)
        self.begin(self._seated(self._candidates(), size))
        for member in self.world:
            del self._waiting[member]
        return Form(self.world)

    def _for_a_change(self, now_s: float) -> Decision:
        num_staying = len(self.world) - len(self._leaving)
        if self._leaving:
            return Resize(none_stays=num_staying == 0)
        size = self._usable(min(self.largest, num_staying + len(self._new)))
        if size <= num_staying:
            return Keep()
        # The time counts from the last arrival, because more members may follow it.
        left_s = max(self._new.values()) + self.gather_s - now_s
        if left_s > 0:
            return Wait(left_s)
        return Resize()

    def _seated(self, candidates: Sequence[str], size: int) -> tuple[str, ...]:
        replica_size = self.layout(size).replica_size
        num_replicas = size // replica_size
        if replica_size == self._replica_size:
            return tuple(seat(candidates, self._ranks, self._nodes, replica_size, num_replicas))
        # In replicas of another size no member finds its part of the model. But one holder of each part must be in the
        # world, because the parts move from there.
        holders: dict[int, str] = {}
        for member in candidates:
            if member in self._ranks:
                holders.setdefault(self._ranks[member] % self._replica_size, member)
        first = list(holders.values())  # in the order of the candidates
        held = set(first)
        others = [member for member in candidates if member not in held]
        return tuple(seat([*first, *others][:size], {}, self._nodes, replica_size, num_replicas))

    def _candidates(self) -> tuple[str, ...]:
        # Survivors come first and in their order, so that the leader stays the same.
        return (*self.world, *self._new)

    @property
    def left_over(self) -> int:
        """Return the number of waiting members that do not fill a replica."""
        num_members = min(self.largest, len(self.world) + len(self._new))
        return num_members - self._usable(num_members)
