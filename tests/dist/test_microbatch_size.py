"""`batch.microbatch_size: auto` is what fits on the rank with the least room; where memory runs out forwards shrink."""

import math
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steadfast.loop.microbatch_size
from steadfast.config import Config
from steadfast.errors import StorageError
from steadfast.loop.microbatch_size import Room
from steadfast.loop.worker_state import WorkerState
from steadfast.run.directory import RunDirectory
from steadfast.tasks import Sums
from steadfast.world.runtime import World
from tests.support.claims import check_identical, check_run, check_weights
from tests.support.drill import drill
from tests.support.gang import MemberFailed
from tests.support.models import Codebook
from tests.support.reference import reference
from tests.support.run_directories import shrink_forwards
from tests.support.small import small

subject: Any = steadfast.loop.microbatch_size
AUTO = "batch.microbatch_size=auto"
KINDS = pytest.mark.parametrize("kind", ["ddp", "fsdp"])
ENOUGH = 99  # samples


def auto(folder: Path, *words: str) -> Config:
    """The small run of 13 samples a step, for one to three workers: four samples leave each of them a microbatch."""
    return small(folder, AUTO, "scaling.num_workers=[1, 3]", *words)


def room_for(num_samples: tuple[int, ...]) -> None:
    """Have each rank find so much memory that so many samples fit, beside what they take for real."""
    honest = subject._measure

    def measure(world: World, *rest: Any) -> Room:
        room: Room = honest(world, *rest)
        needed = max(0, room.one - room.sample) + (num_samples[world.rank] + 0.5) * room.sample
        return room._replace(free=math.ceil(needed / subject._USED_SHARE))

    subject._measure = measure


def never_measure() -> None:
    def measure(*_: object) -> Room:
        raise AssertionError("the size is known")

    subject._measure = measure


def run_out(num_samples: int, rank: int) -> None:
    """Have the task of a rank run out of memory while so many samples are measured."""
    honest = subject._measure

    def measure(world: World, worker: WorkerState, *rest: Any) -> Room:
        task = worker.task
        loss = task.loss

        def strike(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
            if world.rank == rank and len(batch[0]) == num_samples:
                raise torch.OutOfMemoryError("measured")
            return loss(model, batch)

        task.loss = strike
        try:
            room: Room = honest(world, worker, *rest)
        finally:
            task.loss = loss
        return room

    subject._measure = measure


@KINDS
def test_the_rank_with_the_least_room_decides_and_another_world_keeps_the_size(tmp_path: Path, kind: str) -> None:
    config = auto(tmp_path, f"parallel.kind={kind}")
    run = drill(config, worlds=[3, 2, 1], leave_after=[4, 4], patch=partial(room_for, (ENOUGH, 2, 3)))
    assert run.told("microbatch_chosen", "microbatch_size") == [2]
    assert run.told("microbatch_chosen", "rank") == [1]
    assert [*map(sum, run.history.shares)] == [7] * 14
    check_run(run, reference(small(tmp_path, "batch.microbatch_size=2")))


@KINDS
def test_a_resume_keeps_the_size_though_memory_differs(tmp_path: Path, kind: str) -> None:
    config = auto(tmp_path, f"parallel.kind={kind}")
    drill(config, worlds=[2], stop_after=5, patch=partial(room_for, (2, 3)))
    run = drill(config, worlds=[3], patch=never_measure)
    check_run(run, reference(small(tmp_path, "batch.microbatch_size=2")))


def room_for_two_and_storage_that_answers_once() -> None:
    room_for((2, 2))
    honest = RunDirectory.microbatch_size

    def ask(self: RunDirectory) -> int | None:
        if self.store.list("asked"):
            raise StorageError("storage is away")
        self.store.commit("asked/once", b"")
        return honest(self)

    RunDirectory.microbatch_size = ask


def test_a_leader_that_is_new_learns_the_size_from_a_survivor(tmp_path: Path) -> None:
    patch = room_for_two_and_storage_that_answers_once
    run = drill(auto(tmp_path), worlds=[[0, 1], [2, 1]], leave_after=[4], patch=patch)
    assert run.told("microbatch_chosen", "microbatch_size") == [2]
    check_run(run, reference(small(tmp_path, "batch.microbatch_size=2")))


def slow_storage_that_is_waited_for() -> None:
    write, fix = RunDirectory.write_microbatch_size, WorkerState.fix_microbatch_size

    def write_slowly(self: RunDirectory, size: int) -> None:
        time.sleep(0.5)
        write(self, size)

    def fix_what_is_written(self: WorkerState, size: int) -> None:
        assert RunDirectory.of(self.config).microbatch_size() == size
        fix(self, size)

    subject.RunDirectory.write_microbatch_size = write_slowly
    subject.WorkerState.fix_microbatch_size = fix_what_is_written


def test_no_rank_goes_on_before_the_size_is_on_storage(tmp_path: Path) -> None:
    run = drill(auto(tmp_path, "run.steps=2"), worlds=[3], patch=slow_storage_that_is_waited_for)
    assert run.summary["status"] == "finished"


def test_with_room_for_all_each_worker_of_the_largest_world_has_a_microbatch(tmp_path: Path) -> None:
    run = drill(auto(tmp_path, "run.steps=2"), worlds=[1])
    assert run.told("microbatch_chosen", "microbatch_size") == [4]  # 13 / 3, and nothing divides 13
    assert run.told("microbatch_chosen", "sample_bytes")[0] > 0


@KINDS
def test_where_memory_runs_out_later_the_size_stays_and_forwards_shrink(tmp_path: Path, kind: str) -> None:
    oom = "faults.inject=[{kind: oom_at, step: 7, rank: 1, times: 2}]"
    words = [f"parallel.kind={kind}", "model.dropout=0", "checkpoint.every=3 steps"]
    run = drill(auto(tmp_path, *words, oom), worlds=[2, 2, 2])
    assert run.told("microbatch_chosen", "microbatch_size") == [4]
    assert run.told("forwards_shrunk", "forward_size") == [2, 1]
    expected = reference(small(tmp_path, "batch.microbatch_size=4", "model.dropout=0"))
    check_weights(run, expected)
    digests = [run.history.committed[step]["samples_digest"] for step in range(1, 15)]
    assert digests == [f"{digest:016x}" for digest in expected.digests]
    assert {*map(sum, run.history.shares)} == {4}


@KINDS
def test_where_two_samples_do_not_fit_a_microbatch_is_of_one(tmp_path: Path, kind: str) -> None:
    config = auto(tmp_path, f"parallel.kind={kind}")
    run = drill(config, worlds=[2, 2], patch=partial(run_out, 2, 1))
    assert run.told("microbatch_chosen", "microbatch_size") == [1]
    check_run(run, reference(small(tmp_path, "batch.microbatch_size=1")))


def test_where_one_sample_does_not_fit_the_run_ends_with_what_to_try(tmp_path: Path) -> None:
    with pytest.raises(MemberFailed, match="a forward of one sample does not fit into memory: measured"):
        drill(auto(tmp_path), worlds=[1, 1], patch=partial(run_out, 1, 0))


class Tracing(Codebook):
    """Shows whatever a forward leaves behind: running statistics, buffers in place and replaced, all randomness."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12)
        random.seed(7)

    def between(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        hidden = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        if self.training:
            hidden = hidden * (1 + 0.1 * random.random())
        return super().between(torch.dropout(hidden, 0.1, self.training), tokens) + 0.01 * self.seen


@pytest.mark.parametrize("parallel", ["{kind: ddp}", "{reducer: torch}", "{kind: fsdp}"])
@pytest.mark.parametrize("model", ["gpt", "tracing"])
def test_what_was_chosen_gives_the_bits_of_the_same_number_given(tmp_path: Path, parallel: str, model: str) -> None:
    words = [f"parallel={parallel}", "run.steps=6", "scaling.num_workers=[1, 3]"]
    if model == "tracing":
        words.append("model={target: 'tests.dist.test_microbatch_size:Tracing'}")
    given = drill(small(tmp_path / "given", *words, "batch.microbatch_size=4"), worlds=[2])
    chosen = drill(small(tmp_path / "chosen", *words, AUTO), worlds=[2])
    assert chosen.told("microbatch_chosen", "microbatch_size") == [4]
    check_identical(chosen, given)
    assert [line["loss"] for line in chosen.history.lines] == [line["loss"] for line in given.history.lines]
    assert chosen.summary["metrics"] == given.summary["metrics"]


# The grid has four microbatches of up to four samples, the last of one.
WORDS = ["model.dropout=0", "batch.microbatch_size=4"]
TENSOR = "fsdp, tensor_size: 2"
GATHERED_ONCE = "fsdp, reshard_after_forward: false"  # for all parts of a microbatch
GRIDS = ["ddp", "fsdp", "pipeline", pytest.param(TENSOR, marks=pytest.mark.slow)]


@pytest.mark.parametrize("kind", GRIDS)
@pytest.mark.parametrize("forward_size", [1, 3])
def test_forwards_of_any_size_give_the_steps_of_whole_microbatches(
    tmp_path: Path, kind: str, forward_size: int
) -> None:
    config = small(tmp_path, *WORDS, f"parallel={{kind: {kind}}}")
    shrink_forwards(config, forward_size)
    largest = 4 if kind in ("pipeline", TENSOR) else 3  # of whole replicas
    check_run(drill(config, worlds=[largest, 2], leave_after=[5]), reference(config))


@pytest.mark.parametrize("kind", [*GRIDS, GATHERED_ONCE])
def test_where_one_rank_runs_out_all_go_on_with_less(tmp_path: Path, kind: str) -> None:
    oom = "faults.inject=[{kind: oom_at, step: 7, rank: 1, times: 2}]"
    config = small(tmp_path, *WORDS, f"parallel={{kind: {kind}}}", oom, "checkpoint.every=3 steps")
    run = drill(config, worlds=[2, 2, 2])
    assert run.told("forwards_shrunk", "forward_size") == [2, 1]
    assert run.told("forwards_shrunk", "step") == [7, 7]
    assert len({tuple(pids) for pids in run.pids()}) == 1, "nobody had to be replaced"
    check_weights(run, reference(config))
    assert sorted(run.history.committed) == list(range(1, 15))
    assert run.summary["lost_steps"] == 0 or kind != "ddp"


def test_what_does_not_fit_alone_ends_the_run_with_what_to_try(tmp_path: Path) -> None:
    oom = "faults.inject=[{kind: oom_at, step: 3, rank: 0, times: null}]"
    with pytest.raises(MemberFailed, match="a forward of one sample does not fit into memory: injected at step 3"):
        drill(small(tmp_path, *WORDS, oom), worlds=[1, 1, 1])


def test_statistics_of_a_microbatch_are_the_mean_of_its_parts(tmp_path: Path) -> None:
    words = ["batch.microbatch_size=4", "model.target=tests.support.models:Normalised", "run.steps=1"]
    plain = drill(small(tmp_path / "plain", *words), worlds=[1])
    config = small(tmp_path / "parts", *words)
    shrink_forwards(config, 2)
    parts = drill(config, worlds=[1])
    name = "norm.running_mean"
    assert (parts.weights[name] - plain.weights[name]).abs().max() <= 1e-10
    assert parts.weights["norm.num_batches_tracked"] == 4
