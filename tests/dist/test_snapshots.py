"""Sharded state in the memory of other nodes: one of them is lost, and the others have all of it."""

import os
import socket
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from steadfast.checkpoint.node_memory import ProcessMemory
from steadfast.checkpoint.snapshots import Snapshots, backup_ranks
from steadfast.config import Every
from steadfast.parallel import Parallel
from steadfast.parallel.dtensor import unsharded
from steadfast.plan import Amendments
from steadfast.world.groups import WorldRank
from steadfast.world.runtime import WorkerProcess, World, form_world
from tests.support.drill import drill
from tests.support.gang import Gang, Member
from tests.support.reference import CPU
from tests.support.small import small

NOTHING = frozenset[int]()
BOUND = Every(30, "seconds")
MEMORY = ProcessMemory()  # of each process
SHARDED = cast(Parallel, SimpleNamespace(survivors_hold_all=False))
LONG_S = 20.0


@pytest.mark.parametrize(
    ("nodes", "backups"),
    [("aab", [2, 2, 0]), ("abc", [1, 2, 0]), ("aabb", [2, 3, 0, 1]), ("aa", [1, 0]), ("abab", [1, 0, 3, 2])],
)
def test_a_copy_goes_to_another_node_where_there_is_one(nodes: str, backups: list[int]) -> None:
    assert backup_ranks(nodes) == backups


def whole(step: int) -> dict[str, Tensor]:
    return {"w": torch.arange(35.0).view(7, 5) + step, "b": torch.full((2,), float(step)), "step": torch.tensor(step)}


def sharded(world: World, step: int) -> dict[str, Any]:
    """Rows over ranks, of which the last have none of `b`; a number that all have."""
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=(f"attempt-{world.attempt}",))
    tensors = whole(step)
    return {name: t if name == "step" else distribute_tensor(t, mesh, [Shard(0)]) for name, t in tensors.items()}


def train(member: Member, attempt: int, members: list[int], nodes: str, steps: list[int]) -> None:
    """A world that takes snapshots of these steps, and then breaks."""
    world = joined(member, attempt, members, nodes)
    try:
        snapshots = Snapshots(world, MEMORY, SHARDED, {"model": sharded(world, 0)}, BOUND)
        for step in steps:
            snapshots.take(step, {"model": sharded(world, step)})
            until = time.monotonic() + LONG_S
            while snapshots._copy is not None:
                assert time.monotonic() < until
                snapshots.wanted()
    finally:
        world.groups.destroy()


def recover(member: Member, attempt: int, members: list[int], skip: frozenset[int] = NOTHING) -> int | None:
    """The step that a new world has restored, whose tensors are what they were."""
    world = joined(member, attempt, members, "abcdefgh")
    try:
        state = sharded(world, -1)
        snapshots = Snapshots(replace(world, amendments=Amendments(skip)), MEMORY, SHARDED, {"model": state}, BOUND)
        found = snapshots.find()
        if found is not None:
            snapshots.load(found, {"model": state})
        step = found.step if found else None
        for name, tensor in whole(-1 if step is None else step).items():
            assert torch.equal(unsharded(state[name]), tensor), name
        return step
    finally:
        world.groups.destroy()


def joined(member: Member, attempt: int, members: list[int], nodes: str) -> World:
    rank = members.index(member.number)
    size = len(members)
    world = form_world(member.store, WorldRank(rank, size, attempt), WorkerProcess(CPU, node=nodes[rank]))
    return replace(world, replica_size=size)


def train_and_lose(member: Member, first: int, nodes: str, lost: list[int], **known: Any) -> int | None:
    """Three ranks train, some are lost, the others go on."""
    train(member, first, [0, 1, 2], nodes, [10, 20, 30])
    staying = [number for number in range(3) if number not in lost]
    return recover(member, first + 1, staying, **known) if member.number in staying else None


@pytest.fixture(scope="module")
def gang() -> Any:
    with Gang(3) as started:
        yield started


@pytest.mark.parametrize(
    ("first", "nodes", "lost", "expected"),
    [
        (10, "abc", [1], [30, None, 30]),
        (20, "abc", [0], [None, 30, 30]),
        (30, "aab", [0, 1], [None, None, 30]),
        (40, "abb", [1, 2], [30, None, None]),
        (50, "abc", [], [30, 30, 30]),
        (60, "abc", [1, 2], [None, None, None]),  # neighbours, of which one held the other's copies
    ],
)
def test_what_a_lost_node_took_along_another_one_has(
    gang: Gang, first: int, nodes: str, lost: list[int], expected: list[int | None]
) -> None:
    assert gang.run(train_and_lose, first, nodes, lost) == expected


def bytes_received(member: Member, first: int, lost: int) -> int | None:
    """The bytes of data that a rank has received to go on, its own included."""
    train(member, first, [0, 1, 2], "abc", [10])
    if member.number == lost:
        return None
    with patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange:
        recover(member, first + 1, [number for number in range(3) if number != lost])
    return int(sum(call.args[0].numel() for call in exchange.call_args_list))


def test_a_rank_is_sent_what_its_shards_need(gang: Gang) -> None:
    row, b, step = 5 * 4, 4, 8
    # The second one gets a row of the first's too, which lies between two parts that it needs.
    assert gang.run(bytes_received, 100, 1) == [4 * row + b + step, None, 3 * row + b + step + row]


def count_collectives(member: Member, first: int, size: int) -> int | None:
    """The number of collectives by which a world of one rank less finds and restores a snapshot."""
    members = list(range(size))
    if member.number in members:
        train(member, first, members, "abcdefgh", [10])
    if member.number not in members[:-1]:
        return None
    names = ("all_gather_object", "broadcast_object_list", "all_to_all_single", "broadcast")
    with patch.multiple(dist, **{name: Mock(side_effect=getattr(dist, name)) for name in names}):
        recover(member, first + 1, members[:-1])
        return int(sum(getattr(dist, name).call_count for name in names))


def test_more_files_take_no_more_collectives() -> None:
    with Gang(8) as gang:
        few = gang.run(count_collectives, 200, 4)
        many = gang.run(count_collectives, 210, 8)
    assert few[0] > 0
    assert few == [*few[:1] * 3, *[None] * 5]
    assert many == [*few[:1] * 7, None]


def test_of_a_state_that_a_bad_step_went_into_an_older_copy_is_restored(gang: Gang) -> None:
    leave_out = partial(train_and_lose, skip=frozenset({25}))
    assert gang.run(leave_out, 90, "abc", [1]) == [20, None, 20]


def be_on_a_node_of_its_own() -> None:
    name = f"node-{os.getpid()}"
    socket.gethostname = lambda: name


@pytest.mark.parametrize("survived", [True, False])
def test_what_is_left_on_one_node_is_written_to_storage_at_once(tmp_path: Path, survived: bool) -> None:
    """Also where nobody is left who was on the other node."""
    config = small(tmp_path, "run.steps=24", "checkpoint.every=1000 steps")
    if survived:
        drilled = drill(config, worlds=[2, 1], leave_after=[6], patch=be_on_a_node_of_its_own)
    else:
        drill(small(tmp_path, "run.steps=6"), worlds=[2], patch=be_on_a_node_of_its_own)
        drilled = drill(config, worlds=[1])
    first, last = drilled.told("checkpoint", "step")[-2:]
    assert 6 < first <= 12
    assert last == 24


def take_as_due(member: Member, attempt: int, bound: Every) -> tuple[list[int], int | None]:
    """Return the steps whose copies are due, and the step that two ranks find; each copy is complete at its step."""
    world = joined(member, attempt, [0, 1, 2], "abc")
    taken: list[int] = []
    try:
        snapshots = Snapshots(world, MEMORY, SHARDED, {"model": sharded(world, 0)}, bound)
        assert snapshots.promise is not None
        snapshots.promise.begin(100)
        for step in range(101, 112):
            if snapshots.due(step):
                taken.append(step)
                snapshots.take(step, {"model": sharded(world, step)})
                assert snapshots._copy is None
        assert snapshots.promise.broken is None
    finally:
        world.groups.destroy()
    return taken, recover(member, attempt + 1, [0, 1]) if member.number < 2 else None


def test_bound_in_steps_is_kept_whatever_a_transfer_takes(gang: Gang) -> None:
    due = [103, 106, 109]
    assert gang.run(take_as_due, 300, Every(3, "steps")) == [(due, 109), (due, 109), (due, None)]


def refuse(*_: Any) -> Any:
    raise OSError("no memory")


def lose_parts(member: Member, attempt: int, refusing: int) -> str:
    """Return why the leader's promise is not kept, if the memory of one rank refuses all copies."""
    world = joined(member, attempt, [0, 1, 2], "abc")
    try:
        snapshots = Snapshots(world, MEMORY, SHARDED, {"model": sharded(world, 0)}, Every(3, "steps"))
        assert snapshots.promise is not None
        with patch.object(ProcessMemory, "take", refuse if member.number == refusing else ProcessMemory.take):
            for step in range(1, 10):
                if snapshots.due(step):
                    snapshots.take(step, {"model": sharded(world, step)})
        broken = snapshots.promise.broken
        return broken.line() if broken is not None else ""
    finally:
        world.groups.destroy()


def test_leader_says_that_another_node_keeps_no_copy(gang: Gang) -> None:
    said = gang.run(lose_parts, 310, 2)
    assert said[0].startswith("checkpoint.lose_at_most=3 steps is not kept: a node did not keep its part of the last")


@pytest.mark.parametrize(
    ("words", "stated", "num_late"),
    [
        (["checkpoint.lose_at_most=2 steps"], ["the loss of a worker costs at most 2 steps of training"], 0),
        (["checkpoint.lose_at_most=0.001 seconds"], ["the loss of a worker costs at most 0.001 seconds of train"], 2),
        (["checkpoint.node_memory=false"], ["checkpoint.lose_at_most=30 seconds is not kept: no copies are made"], 0),
        (["parallel.kind=ddp"], [], 0),
    ],
)
def test_run_states_its_promise_once_and_each_attempt_that_it_is_not_kept(
    tmp_path: Path, words: list[str], stated: list[str], num_late: int
) -> None:
    drilled = drill(small(tmp_path, "run.steps=12", "parallel.kind=fsdp", *words), worlds=[2, 2], leave_after=[5])
    texts = [event["text"] for event in drilled.events if "lose_at_most" in event.get("text", "")]
    late = drilled.told("copies_late", "text")
    assert len(late) == num_late
    assert all("a step takes too long" in text or "a copy takes too long" in text for text in late)
    assert [text[: len(start)] for text, start in zip(texts, stated, strict=False)] == stated
    assert len(texts) == len(stated) + num_late
