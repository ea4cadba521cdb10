"""Links between nodes, and collectives over all of them: checked for right results, then timed.

Every function here runs on all ranks of a small world at the same time, and is a collective.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from app.world.groups import Groups
from app.world.timeouts import Timeouts

SIZES_BYTES = (2**10, 2**16, 2**22)  # not larger: rank 0 holds as many messages as there are ranks
_LINK_SIZES_BYTES = (2**10, 2**16, 2**19, 2**22)
_NUM_PINGS = 20
_NUM_TIMES = 5  # of which the fastest counts: whatever else the machines do only makes them slower
_LONG_S = 0.25  # after which nothing is tried again
_TOO_LONG_S = 2.0  # that a message and its answer may take
_BYTES_PER_ELEMENT = 4
_PERIOD = 997  # of the values sent: a prime, so that no two blocks of a message are the same


class Place(NamedTuple):
    """A rank's place in a world, and where its store listens."""

    host: str
    port: int
    number: int  # of the world: no two that use one store may have the same
    rank: int
    size: int


@dataclass(frozen=True)
class LinkFigures:
    latency_s: float
    bytes_per_s: float
    intact: bool  # what came back is what was sent


@dataclass(frozen=True)
class CollectiveFigures:
    """What one rank saw of one collective."""

    name: str
    seconds: dict[int, float]  # bytes of a message -> the fastest time
    wrong: str  # the first wrong value; empty where all were right


class _ShortTimeouts(Timeouts):
    @property
    def collective(self) -> timedelta:
        # Nobody trains here, so who does not answer for so long cannot be reached.
        return timedelta(seconds=20)


@contextlib.contextmanager
def join_world(place: Place, device: torch.device) -> Iterator[Groups]:
    """Form a world with the other ranks, for as long as the context lasts.

    Raises:
        PeerLost: somebody cannot be reached.
    """
    timeouts = _ShortTimeouts(silence_s=2.0)
    store = dist.TCPStore(place.host, place.port, None, False, timeout=timeouts.form, wait_for_workers=False)
    groups = Groups.form(store, place.rank, place.size, place.number, device, timeouts)
    try:
        yield groups
    finally:
        groups.destroy()


def measure_link(place: Place, device: torch.device) -> LinkFigures | None:
    """Send messages to the other of two ranks and back. Return what rank 0 measures, None on rank 1."""
    with join_world(place, device) as groups:
        if place.rank == 1:
            _echo(groups, device)
            return None
        ping_s, intact = _round_trip(groups, 1, device, _NUM_PINGS)
        bytes_per_s = 0.0
        # What a network lets through at once, before it slows down, makes smaller messages look fast: the last counts.
        for num_bytes in _LINK_SIZES_BYTES:
            # Before it is sent: over a slow link it would take longer than anybody waits for.
            if bytes_per_s and 2 * num_bytes / bytes_per_s > _TOO_LONG_S:
                break
            passed_s, same = _fastest_round_trip(groups, num_bytes // _BYTES_PER_ELEMENT, device)
            bytes_per_s = 2 * num_bytes / passed_s
            intact = intact and same
        _announce(groups, 0, 0, device)
        return LinkFigures(ping_s / 2, bytes_per_s, intact)


def _fastest_round_trip(groups: Groups, num_elements: int, device: torch.device) -> tuple[float, bool]:
    """Do as `_round_trip` does, several times unless once takes long."""
    first_s, intact = _round_trip(groups, num_elements, device, 1)
    if first_s > _LONG_S:
        return first_s, intact
    others_s, others_intact = _round_trip(groups, num_elements, device, _NUM_TIMES - 1)
    return min(first_s, others_s), intact and others_intact


def _round_trip(groups: Groups, num_elements: int, device: torch.device, num_times: int) -> tuple[float, bool]:
    """Return the shortest time of a message to the other rank and back, and whether it came back as it was sent."""
    group = groups.communicator.group
    sent = _pattern(0, num_elements, device)
    _announce(groups, num_elements, num_times, device)
    shortest_s = float("inf")
    intact = True
    for _ in range(num_times):
        received = torch.zeros_like(sent)
        began_s = time.perf_counter()
        dist.send(sent, 1, group)
        dist.recv(received, 1, group)
        groups.gate()
        shortest_s = min(shortest_s, time.perf_counter() - began_s)
        intact = intact and torch.equal(sent, received)
    return shortest_s, intact


def _announce(groups: Groups, num_elements: int, num_times: int, device: torch.device) -> None:
    dist.send(torch.tensor([num_elements, num_times], device=device), 1, groups.communicator.group)


def _echo(groups: Groups, device: torch.device) -> None:
    """Return whatever rank 0 sends, until it announces an empty message."""
    group = groups.communicator.group
    announced = torch.zeros(2, dtype=torch.int64, device=device)
    while True:
        dist.recv(announced, 0, group)
        groups.gate()
        num_elements, num_times = announced.tolist()
        if not num_elements:
            return
        message = torch.zeros(num_elements, device=device)
        for _ in range(num_times):
            dist.recv(message, 0, group)
            dist.send(message, 0, group)


def measure_collectives(place: Place, device: torch.device, sizes_bytes: tuple[int, ...]) -> list[CollectiveFigures]:
    """Run each collective with messages of these sizes. Return what this rank saw."""
    measured = []
    with join_world(place, device) as groups:
        for name, collective in COLLECTIVES.items():
            seconds = {}
            wrong = ""
            for num_bytes in sizes_bytes:
                case = _Case(groups, place.rank, place.size, num_bytes // _BYTES_PER_ELEMENT, device)
                seconds[num_bytes], found = _repeat(case, collective)
                wrong = wrong or found
            measured.append(CollectiveFigures(name, seconds, wrong))
    return measured


def _repeat(case: _Case, collective: Callable[[_Case], _Ran]) -> tuple[float, str]:
    """Return the shortest time of a collective, and the first wrong value that came of it."""
    shortest_s = float("inf")
    wrong = ""
    for _ in range(_NUM_TIMES):
        ran = collective(case)
        shortest_s = min(shortest_s, ran.seconds)
        wrong = wrong or _difference(ran.found, ran.expected)
    return shortest_s, wrong


def sizes_for(bytes_per_s: float) -> tuple[int, ...]:
    """Return the sizes of messages that do not take long over a link of that speed, at least the smallest."""
    return tuple(size for size in SIZES_BYTES if size <= max(SIZES_BYTES[0], bytes_per_s * _LONG_S))


class _Case(NamedTuple):
    """One size of message for one collective, as one rank sees it."""

    groups: Groups
    rank: int
    size: int
    num_elements: int
    device: torch.device

    @property
    def group(self) -> dist.ProcessGroup:
        return self.groups.communicator.group

    def message(self, rank: int) -> Tensor:
        """Return what a rank contributes."""
        return _pattern(rank, self.num_elements, self.device)

    def messages(self) -> list[Tensor]:
        return [self.message(rank) for rank in range(self.size)]

    def time(self, collective: Callable[[], object]) -> float:
        """Return how long a collective takes until its result is there."""
        dist.barrier(self.groups.control)
        began_s = time.perf_counter()
        collective()
        self.groups.gate()
        return time.perf_counter() - began_s


class _Ran(NamedTuple):
    seconds: float
    found: Tensor
    expected: Tensor


def _all_reduce(case: _Case) -> _Ran:
    tensor = case.message(case.rank)
    seconds = case.time(lambda: dist.all_reduce(tensor, group=case.group))
    return _Ran(seconds, tensor, torch.stack(case.messages()).sum(dim=0))


def _broadcast(case: _Case) -> _Ran:
    source = case.size - 1
    tensor = case.message(case.rank)
    seconds = case.time(lambda: dist.broadcast(tensor, source, case.group))
    return _Ran(seconds, tensor, case.message(source))


def _gather(case: _Case) -> _Ran:
    tensor = case.message(case.rank)
    gathered = [torch.zeros_like(tensor) for _ in range(case.size)] if case.rank == 0 else None
    seconds = case.time(lambda: dist.gather(tensor, gathered, 0, case.group))
    if gathered is None:
        return _Ran(seconds, tensor, tensor)
    return _Ran(seconds, torch.cat(gathered), torch.cat(case.messages()))


def _scatter(case: _Case) -> _Ran:
    tensor = torch.zeros_like(case.message(case.rank))
    parts = case.messages() if case.rank == 0 else None
    seconds = case.time(lambda: dist.scatter(tensor, parts, 0, case.group))
    return _Ran(seconds, tensor, case.message(case.rank))


COLLECTIVES = {"all_reduce": _all_reduce, "broadcast": _broadcast, "gather": _gather, "scatter": _scatter}


def _pattern(rank: int, num_elements: int, device: torch.device) -> Tensor:
    # Small integers, so that their sum over ranks is exact in any order.
    return (torch.arange(num_elements, device=device) % _PERIOD + rank + 1).float()


def _difference(found: Tensor, expected: Tensor) -> str:
    """Return where two tensors differ first; empty if they are equal."""
    if torch.equal(found, expected):
        return ""
    index = int((found != expected).nonzero()[0])
    return f"element {index} of {len(found)} is {float(found[index]):g}, and should be {float(expected[index]):g}"
