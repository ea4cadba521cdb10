"""Measurements of links between nodes and of collectives over all nodes.

Results are checked for errors too. All ranks of a small world must call `join_world` and the `measure_` functions at
the same time.
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

from steadfast.world.groups import Groups, WorldRank
from steadfast.world.timeouts import Timeouts

# Larger messages would need much memory on rank 0, which holds a message of each rank.
SIZES_BYTES = (2**10, 2**16, 2**22)
_LINK_SIZES_BYTES = (2**10, 2**16, 2**19, 2**22)
_NUM_PINGS = 20
# The fastest of these counts, because other load on the machines can only slow down a measurement.
_NUM_TIMES = 5
_LONG_S = 0.25  # a measurement that takes longer is not repeated
_TOO_LONG_S = 2.0  # limit for a message and its answer
_BYTES_PER_ELEMENT = 4
# Period of the sent values. It is a prime, so that blocks of a message differ from each other.
_PERIOD = 997


class RankHost(NamedTuple):
    """Rank's position in a world, with the address of the world's store."""

    host: str
    port: int
    number: int  # number of the world, unique among the worlds that use one store
    rank: int
    size: int


@dataclass(frozen=True)
class LinkFigures:
    """Measurements of one link."""

    latency_s: float
    bytes_per_s: float
    intact: bool  # whether all messages came back unchanged


@dataclass(frozen=True)
class CollectiveFigures:
    """Measurements of one collective on one rank."""

    name: str
    seconds: dict[int, float]  # shortest time by the bytes of a message
    wrong: str  # description of the first wrong value, "" if all values were right


class _ShortTimeouts(Timeouts):
    @property
    def collective(self) -> timedelta:
        # No rank trains during the checks, so a rank that does not answer within this time cannot be reached.
        return timedelta(seconds=20)


@contextlib.contextmanager
def join_world(place: RankHost, device: torch.device) -> Iterator[Groups]:
    """Form a world of all ranks for the duration of the context.

    Raises:
        PeerLost: a rank cannot be reached.
    """
    timeouts = _ShortTimeouts(silence_s=2.0)
    store = dist.TCPStore(place.host, place.port, None, False, timeout=timeouts.form, wait_for_workers=False)
    groups = Groups.form(store, WorldRank(place.rank, place.size, place.number), device, timeouts)
    try:
        yield groups
    finally:
        groups.destroy()


def measure_link(place: RankHost, device: torch.device) -> LinkFigures | None:
    """Measure the link between two ranks by sending messages back and forth.

    Return the measurements on rank 0, None on rank 1.

    Args:
        place: rank of this process, and the address of the world's store.
    """
    with join_world(place, device) as groups:
        if place.rank == 1:
            _echo(groups, device)
            return None
        ping_s, intact = _round_trip(groups, 1, device, _NUM_PINGS)
        bytes_per_s = 0.0
        # Many networks let a burst pass before they limit the speed, which makes small messages look fast. So the speed
        # of the last, largest message counts.
        for num_bytes in _LINK_SIZES_BYTES:
            # A size that would exceed the time limit, at the speed measured so far, is not sent at all.
            if bytes_per_s and 2 * num_bytes / bytes_per_s > _TOO_LONG_S:
                break
            passed_s, same = _fastest_round_trip(groups, num_bytes // _BYTES_PER_ELEMENT, device)
            bytes_per_s = 2 * num_bytes / passed_s
            intact = intact and same
        _announce(groups, 0, 0, device)
        return LinkFigures(ping_s / 2, bytes_per_s, intact)


def _fastest_round_trip(groups: Groups, num_elements: int, device: torch.device) -> tuple[float, bool]:
    """Return the best of several round trips, or of one slow round trip."""
    first_s, intact = _round_trip(groups, num_elements, device, 1)
    if first_s > _LONG_S:
        return first_s, intact
    others_s, others_intact = _round_trip(groups, num_elements, device, _NUM_TIMES - 1)
    return min(first_s, others_s), intact and others_intact


def _round_trip(groups: Groups, num_elements: int, device: torch.device, num_times: int) -> tuple[float, bool]:
    """Return the shortest round-trip time, and whether messages came back unchanged."""
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
        # NCCL only queues transfers, so without this wait the measured time would be too short.
        groups.gate()
        shortest_s = min(shortest_s, time.perf_counter() - began_s)
        intact = intact and torch.equal(sent, received)
    return shortest_s, intact


def _announce(groups: Groups, num_elements: int, num_times: int, device: torch.device) -> None:
    # Rank 1 cannot know the next message, because its size depends on the speed that rank 0 has measured.
    dist.send(torch.tensor([num_elements, num_times], device=device), 1, groups.communicator.group)


def _echo(groups: Groups, device: torch.device) -> None:
    """Send back messages until rank 0 announces an empty one."""
    group = groups.communicator.group
    announced = torch.zeros(2, dtype=torch.int64, device=device)
    while True:
        dist.recv(announced, 0, group)
        # NCCL only queues the receive, and the next line reads the values.
        groups.gate()
        num_elements, num_times = announced.tolist()
        if not num_elements:
            return
        message = torch.zeros(num_elements, device=device)
        for _ in range(num_times):
            dist.recv(message, 0, group)
            dist.send(message, 0, group)


def measure_collectives(place: RankHost, device: torch.device, sizes_bytes: tuple[int, ...]) -> list[CollectiveFigures]:
    """Measure each collective on this rank with messages of these sizes."""
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
    """Return the shortest time of a collective and its first wrong value."""
    shortest_s = float("inf")
    wrong = ""
    for _ in range(_NUM_TIMES):
        # Every result is checked, not only the fastest: a faulty part may fail now and then.
        ran = collective(case)
        shortest_s = min(shortest_s, ran.seconds)
        wrong = wrong or _difference(ran.found, ran.expected)
    return shortest_s, wrong


def sizes_for(bytes_per_s: float) -> tuple[int, ...]:
    """Return the message sizes that a link of this speed sends quickly.

    The smallest size is always included.
    """
    largest = max(SIZES_BYTES[0], bytes_per_s * _LONG_S)
    return tuple(size for size in SIZES_BYTES if size <= largest)


class _Case(NamedTuple):
    """One collective with messages of one size, on one rank."""

    groups: Groups
    rank: int
    size: int
    num_elements: int
    device: torch.device

    @property
    def group(self) -> dist.ProcessGroup:
        return self.groups.communicator.group

    def message(self, rank: int) -> Tensor:
        """Return the message of a rank."""
        return _pattern(rank, self.num_elements, self.device)

    def messages(self) -> list[Tensor]:
        return [self.message(rank) for rank in range(self.size)]

    def time(self, collective: Callable[[], object]) -> float:
        """Return the seconds until the result of a collective is there."""
        # Without the barrier the time would include the wait for a rank that arrives late.
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
    # Other ranks than 0 receive nothing that could be compared.
    if case.rank != 0:
        seconds = case.time(lambda: dist.gather(tensor, None, 0, case.group))
        return _Ran(seconds, tensor, tensor)
    gathered = [torch.zeros_like(tensor) for _ in range(case.size)]
    seconds = case.time(lambda: dist.gather(tensor, gathered, 0, case.group))
    return _Ran(seconds, torch.cat(gathered), torch.cat(case.messages()))


def _scatter(case: _Case) -> _Ran:
    tensor = torch.zeros_like(case.message(case.rank))
    parts = case.messages() if case.rank == 0 else None
    seconds = case.time(lambda: dist.scatter(tensor, parts, 0, case.group))
    return _Ran(seconds, tensor, case.message(case.rank))


COLLECTIVES = {"all_reduce": _all_reduce, "broadcast": _broadcast, "gather": _gather, "scatter": _scatter}


def _pattern(rank: int, num_elements: int, device: torch.device) -> Tensor:
    # The values are small integers, so that their sum over ranks is exact in any order.
    return (torch.arange(num_elements, device=device) % _PERIOD + rank + 1).float()


def _difference(found: Tensor, expected: Tensor) -> str:
    """Describe the first difference of two tensors, "" if there is none."""
    if torch.equal(found, expected):
        return ""
    index = int((found != expected).nonzero()[0])
    return f"element {index} of {len(found)} is {float(found[index]):g} instead of {float(expected[index]):g}"
