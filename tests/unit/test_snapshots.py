"""What a loss would cost in steps, and what copies in memory may take of it."""

import math
import threading
import time
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.distributed as dist

from steadfast.checkpoint.node_memory import Buffer, ProcessMemory
from steadfast.checkpoint.snapshots import _TIME_SHARE, AtRisk, Snapshots, _Place, _refusal, backup_ranks
from steadfast.config import DdpConfig, Every
from steadfast.loop.trigger import Interval
from steadfast.parallel import Parallel, build_parallel
from steadfast.parallel.precision import Precision
from steadfast.world.groups import WorldRank
from steadfast.world.runtime import WorkerProcess, form_world

BOUND = Every(30, "seconds")


@pytest.mark.parametrize(
    ("shard", "ranks_by_node", "expected"),
    [
        (1, [[0]], AtRisk(3, 3, 3, 60, 60)),
        (1, [[0, 1]], AtRisk(0, 3, 3, 60, 60)),
        (1, [[0], [1]], AtRisk(0, 0, 3, 0, 60)),
        (2, [[0, 1]], AtRisk(3, 3, 3, 60, 60)),
        (4, [[0, 1], [2, 3]], AtRisk(3, 3, 3, 3, 60)),
        # Two replicas: on one node, on one each, over both.
        (2, [[0, 1, 2, 3]], AtRisk(0, 3, 3, 60, 60)),
        (2, [[0, 1], [2, 3]], AtRisk(0, 0, 3, 0, 60)),
        (2, [[0, 2], [1, 3]], AtRisk(0, 3, 3, 3, 60)),
        (2, [[0, 1, 2], [3]], AtRisk(0, 3, 3, 3, 60)),
    ],
)
def test_a_loss_costs_the_steps_since_the_newest_state_elsewhere(
    shard: int, ranks_by_node: list[list[int]], expected: AtRisk
) -> None:
    assert AtRisk.of(100, newest=97, committed=40, replica_size=shard, ranks_by_node=ranks_by_node) == expected


def test_the_time_for_who_copies_what_grows_linearly_with_the_ranks() -> None:
    nodes = [f"node-{rank // 8}" for rank in range(10_000)]
    ranks_by_node = [range(first, first + 8) for first in range(0, 10_000, 8)]
    began_s = time.process_time()
    backups = backup_ranks(nodes)
    _refusal([_Place(node, True, 1, 10**9, 0) for node in nodes], range(10_000), backups)
    AtRisk.of(100, newest=97, committed=40, replica_size=5_000, ranks_by_node=ranks_by_node)
    assert time.process_time() - began_s < 1.0  # about 0.02 s, and 5 s if each rank looked at all others
    assert backups[:9] == [*range(8, 16), 16]
    assert backups[-1] == 7


@pytest.mark.parametrize("every", [Every(5, "minutes"), Every(1000, "steps")])
def test_an_act_that_is_due_at_once_is_requested_once(every: Every) -> None:
    trigger = Interval(every, 1, int, clock=lambda: 0.0)
    assert not trigger.wanted()
    trigger.hurry()
    assert trigger.wanted()
    assert not trigger.wanted()
    trigger.done()
    assert not trigger.wanted()


class Slow(ProcessMemory):
    """Memory of a machine that takes long to be mapped, by the thread that reserves it and by each `take`."""

    lasting = True

    def __init__(self) -> None:
        super().__init__()
        self.reserved = threading.Event()

    def reserve(self, num_bytes: int, count: int) -> threading.Thread:
        thread = threading.Thread(target=self.reserved.wait)
        thread.start()
        return thread

    def take(self, num_bytes: int) -> Buffer:
        time.sleep(0.2)
        return super().take(num_bytes)


def test_a_copy_waits_for_its_memory_and_the_next_one_is_due_by_the_time_of_the_copy_alone() -> None:
    memory, state = Slow(), {"model": {"weight": torch.ones(4)}}
    world = form_world(dist.HashStore(), WorldRank(0, 1, 1), WorkerProcess(torch.device("cpu")))
    try:
        parallel = build_parallel(DdpConfig(), world, Precision(torch.device("cpu")))
        snapshots = Snapshots(world, memory, parallel, state, BOUND)
        assert not snapshots.wanted()
        memory.reserved.set()
        while not snapshots.wanted():
            time.sleep(0.01)
        taken = snapshots.take(1, state)
        assert taken.stall_s >= 0.2
        assert snapshots._next_s - time.monotonic() < 0.1 / _TIME_SHARE
    finally:
        world.groups.destroy()


def test_copy_that_a_bound_needs_waits_neither_for_its_cost_nor_for_its_memory() -> None:
    memory, state = Slow(), {"model": {"weight": torch.ones(4)}}
    world = form_world(dist.HashStore(), WorldRank(0, 1, 1), WorkerProcess(torch.device("cpu")))
    try:
        parallel = cast(Parallel, SimpleNamespace(survivors_hold_all=False))
        snapshots = Snapshots(world, memory, parallel, state, Every(0.5, "seconds"))
        assert snapshots.promise is not None
        snapshots.promise.begin(0)
        assert not snapshots.wanted()  # its memory is being reserved, and nothing is urgent yet
        time.sleep(0.3)
        assert snapshots.wanted()
        memory.reserved.set()
        snapshots.take(1, state)
        snapshots.done()
        snapshots._next_s = math.inf  # as after a copy that was dear
        assert not snapshots.wanted()
        time.sleep(0.3)
        assert snapshots.wanted()
    finally:
        memory.reserved.set()
        world.groups.destroy()


def test_validation_checkpoint_and_compilation_do_not_count_as_training_that_is_repeated() -> None:
    world = form_world(dist.HashStore(), WorldRank(0, 1, 1), WorkerProcess(torch.device("cpu")))
    try:
        parallel = cast(Parallel, SimpleNamespace(survivors_hold_all=False))
        snapshots = Snapshots(world, None, parallel, {"model": {}}, BOUND)
        before_s = snapshots._trained_s() - time.monotonic()
        for phase, seconds in {"validation": 100.0, "checkpoint": 20.0, "compile": 3.0, "snapshot": 1000.0}.items():
            world.progress._spent[phase] += seconds
        assert snapshots._trained_s() - time.monotonic() == pytest.approx(before_s - 123.0, abs=0.1)
    finally:
        world.groups.destroy()


def place(node: str, file_gib: float, free_gib: float, held_gib: float = 0.0) -> _Place:
    return _Place(node, True, *(int(gib * 2**30) for gib in (file_gib, free_gib, held_gib)))


@pytest.mark.parametrize(
    ("places", "writers", "backups", "refused"),
    [
        ([place("a", 1, 5)], [0], [], False),
        ([place("a", 1, 3)], [0], [], True),
        ([place("a", 1, 1, held_gib=4)], [0], [], False),  # what former copies hold is used again
        ([place("a", 1, 9), place("b", 1, 3)], [0, 1], [], True),  # one node without room is enough
        ([place("a", 1, 7), place("a", 1, 7)], [0, 1], [], True),  # two of a node need twice as much
        ([place("a", 1, 9), place("a", 1, 9)], [0, 1], [], False),
        ([place("a", 1, 7), place("b", 1, 7)], [0, 1], [1, 0], True),  # each has its own and the other's
        ([place("a", 1, 9), place("b", 1, 9)], [0, 1], [1, 0], False),
        ([place("a", 1, 5), place("b", 1, 3)], [0], [1, 0], True),  # one that writes none has another's
        ([place("a", 1, 5), place("b", 1, 5)], [0], [1, 0], False),
    ],
)
def test_copies_take_half_of_the_free_memory_of_any_node_and_no_more(
    places: list[_Place], writers: list[int], backups: list[int], refused: bool
) -> None:
    found = _refusal(places, writers, backups)
    assert (found is not None) is refused
    if found:
        assert "GiB of a node's memory, of which" in found.line()
