"""Workers come and go, and runs are extended: the result is the one that an undisturbed run gives."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from steadfast.checkpoint.catalog import Catalog, path_of
from steadfast.config import Config
from steadfast.launch.resume import start_or_resume
from steadfast.loop.worker_state import WorkerState
from steadfast.run.directory import RunDirectory
from steadfast.run.events import RunStarted
from tests.support.claims import (
    EQUAL,
    check_checkpoint,
    check_equal,
    check_identical,
    check_run,
    check_weights,
    largest_difference,
)
from tests.support.drill import Drilled, Members, drill
from tests.support.gang import MemberFailed
from tests.support.patches import put_all_beyond_reach
from tests.support.reference import reference
from tests.support.small import CONTEXT, DRAWING, VOCABULARY, Tokens, small


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def resized(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Drilled:
    """Fourteen steps: five by three workers, five by two of them, four by all three."""
    config = small(tmp_path_factory.mktemp("resized"), f"parallel.kind={kind}")
    return drill(config, worlds=[3, 2, 3], leave_after=[4, 4])


def test_a_run_that_shrinks_and_grows_equals_an_undisturbed_one(resized: Drilled, kind: str, tmp_path: Path) -> None:
    config = small(tmp_path, f"parallel.kind={kind}")
    undisturbed = drill(config, worlds=[3])
    check_equal(resized.weights, undisturbed.weights)
    check_equal(resized.optimizer, undisturbed.optimizer)
    check_run(undisturbed, reference(config))
    check_run(resized, reference(config))


@pytest.mark.parametrize(("section", "worlds"), [("", [3, 2, 3]), (", shard_size: 2", [4, 2, 4])])
def test_layers_gathered_for_a_step_live_through_validations_and_resizes(
    tmp_path: Path, section: str, worlds: list[int]
) -> None:
    """A validation leaves layers gathered, and the next update must change what is gathered after it."""
    parallel = f"parallel={{kind: fsdp, reshard_after_forward: false{section}}}"
    words = ["validation.every=2 steps", "checkpoint.every=3 steps"]
    config = small(tmp_path, parallel, *words)
    run = drill(config, worlds=worlds, leave_after=[4, 4])
    check_run(run, reference(config))
    freed = small(tmp_path / "freed", parallel.replace("false", "true"), *words)
    check_identical(run, drill(freed, worlds=worlds, leave_after=[4, 4]))


def test_processes_live_through_resizes_with_replicated_state_and_shards_in_memory(resized: Drilled, kind: str) -> None:
    first, second, third = resized.pids()
    assert first == third
    assert second == first[:2]
    assert [line["world_size"] for line in resized.history.lines] == [3] * 5 + [2] * 5 + [3] * 4
    assert resized.summary["lost_steps"] == 0
    assert resized.told("restore", "step") == [5, 10]
    if kind == "ddp":  # neither written nor read
        assert resized.told("restore", "source") == ["rank 0", "rank 0"]
        assert resized.told("checkpoint", "step") == [14]
    else:
        assert resized.told("restore", "source") == ["snapshot", "snapshot"]
        assert resized.told("checkpoint", "step") == [5, 10, 14]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_in_32_and_16_bits_the_result_is_equivalent_to_that_of_undisturbed_runs(
    tmp_path: Path, kind: str, precision: str
) -> None:
    """It differs by rounding: not by much more than undisturbed runs of the same sizes differ from each other."""
    words = [f"parallel.kind={kind}", f"precision.kind={precision}"]
    ours = drill(small(tmp_path / "ours", *words), worlds=[3, 1, 2], leave_after=[4, 4])
    one, *others = (drill(small(tmp_path / f"{size}", *words), worlds=[size]) for size in (1, 2, 3))
    assert ours.summary["metrics"]["loss"] == pytest.approx(one.summary["metrics"]["loss"], rel=0.002)
    # Rounding to 16 bits hides the order of sums until one number rounds the other way: two sizes alone can agree.
    rounding = max(largest_difference(one.weights, other.weights) for other in others)
    assert largest_difference(ours.weights, one.weights) <= 3 * rounding


def test_the_newest_state_is_taken_from_whichever_rank_has_it(tmp_path: Path) -> None:
    """The first leader leaves, and comes back as rank 0 with a state that is five steps old."""
    config = small(tmp_path)
    run = drill(config, worlds=[3, [2, 1], 3], leave_after=[4, 4])
    check_run(run, reference(config))
    assert run.told("restore", "source") == ["rank 0", "rank 1"]


def test_any_sequence_of_worlds_will_do(tmp_path: Path, kind: str) -> None:
    """Down to one worker, up to five in another order, and off to two of them; the last batch is a short one."""
    config = small(tmp_path, f"parallel.kind={kind}", "run.epochs=3", "checkpoint.keep_last=1")
    run = drill(config, worlds=[2, 1, [4, 2, 0, 1, 3], [3, 2]], leave_after=[1, 2, 2])
    check_run(run, reference(config))
    assert [line["world_size"] for line in run.history.lines] == [2] * 2 + [1] * 3 + [5] * 3 + [2] * 5
    assert run.history.lines[-1]["num_samples"] == 9


def test_a_loss_that_draws_from_all_generators_draws_the_same_in_any_world(tmp_path: Path, kind: str) -> None:
    config = small(tmp_path, f"parallel.kind={kind}", DRAWING)
    check_run(drill(config, worlds=[2, 1, 3], leave_after=[3, 3]), reference(config))


@pytest.mark.parametrize("generator", ["torch", "numpy", "random"])
def test_a_dataset_that_draws_samples_when_it_is_built_is_the_same_on_all_ranks(tmp_path: Path, generator: str) -> None:
    def config(storage: Path) -> Config:
        split = "{target: 'tests.support.small:Split', args: {part: "
        parts = [f"{split}{part}, generator: {generator}}}" for part in (0, 1)]
        return small(storage, f"data={parts[0]}, validation: {parts[1]}}}}}")

    alone = drill(config(tmp_path / "1"), worlds=[1])
    resized = drill(config(tmp_path / "2"), worlds=[2, 3], leave_after=[3])
    check_equal(resized.weights, alone.weights)
    assert resized.summary["metrics"]["loss"] == pytest.approx(alone.summary["metrics"]["loss"], abs=EQUAL)
    worker = WorkerState(config(tmp_path), torch.device("cpu"))
    parts: tuple[Any, Any] = worker.dataset, worker.loader._validation._dataset
    assert not {*parts[0].ids} & {*parts[1].ids}


def test_a_wish_is_heard_although_every_step_is_checkpointed(tmp_path: Path, kind: str) -> None:
    """A checkpoint reads the control word before the next step would: what is wished in it must not be lost."""
    config = small(tmp_path, f"parallel.kind={kind}", "checkpoint.every=1 steps")
    run = drill(config, worlds=[2, 3], leave_after=[3], stop_after=4)
    assert run.summary["status"] == "stopped"
    assert {line["world_size"] for line in run.history.lines} == {2, 3}
    assert run.history.last_step <= 9


def test_a_run_that_is_stopped_and_resumed_is_identical_to_one_that_was_not(tmp_path: Path, kind: str) -> None:
    # Augmentation must not make the same dataset look like another one, whose checkpoints would be refused.
    draws = "data.args.all_generators=true"
    overrides = [f"parallel.kind={kind}", "precision.kind=fp32", "run.steps=12", draws]
    undisturbed = drill(small(tmp_path / "undisturbed", *overrides), worlds=[3])
    config = small(tmp_path / "resumed", *overrides)
    stopped = drill(config, worlds=[3], stop_after=6)
    resumed = drill(config, worlds=[3])
    assert (stopped.summary["status"], stopped.summary["step"]) == ("stopped", 7)
    assert not {*stopped.pids()[0]} & {*resumed.pids()[0]}
    check_identical(resumed, undisturbed)


@pytest.mark.parametrize(("writer", "reader"), [("ddp", "fsdp"), ("fsdp", "ddp")])
def test_a_checkpoint_of_one_strategy_is_restored_bit_by_bit_by_the_other(
    tmp_path: Path, writer: str, reader: str
) -> None:
    written = drill(small(tmp_path, f"parallel.kind={writer}"), worlds=[2])
    restored = drill(small(tmp_path, f"parallel.kind={reader}"), worlds=[3])  # nothing is left to do but to restore
    assert restored.told("restore", "source") == ["checkpoint"]
    assert restored.told("checkpoint", "step") == [14]
    check_identical(restored, written)


def test_a_run_does_not_go_on_over_other_data(tmp_path: Path) -> None:
    drill(small(tmp_path), worlds=[2], stop_after=4)
    with pytest.raises(MemberFailed, match=r"StorageError: .*step-00000005 was written over another dataset"):
        drill(small(tmp_path, "data.args.num_samples=60"), worlds=[2])


class Augmented(Tokens):
    """Augments with generators of its own, one of numpy and one of torch."""

    def __init__(self) -> None:
        super().__init__()
        self._own = np.random.default_rng(), torch.Generator()
        self._own[1].seed()

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        inputs, targets = super().__getitem__(index)
        inputs[self._own[0].integers(CONTEXT)] = torch.randint(VOCABULARY, (), generator=self._own[1])
        return inputs, targets


def former_fingerprint(config: Config) -> None:
    """Write into the manifests what a former version would have written: a digest of two samples, as they were then."""
    catalog = Catalog(RunDirectory.of(config).store, config.checkpoint)
    for step in catalog.steps():
        manifest = catalog.manifest(step)
        assert manifest is not None
        catalog.commit(replace(manifest, dataset="0123456789abcdef"))


@pytest.mark.parametrize("stored", [None, former_fingerprint])
def test_a_run_over_data_that_nothing_seeds_goes_on_and_says_so_once(
    tmp_path: Path, stored: Callable[[Config], None] | None
) -> None:
    config = small(tmp_path, "data.target=tests.dist.test_generations:Augmented")
    drill(config, worlds=[2], stop_after=4)
    if stored is not None:
        stored(config)
    run = drill(config, worlds=[3])
    assert run.summary["step"] == 14
    assert len([text for text in run.told("notice", "text") if "draws numbers that nothing seeds" in text]) == 1


@pytest.mark.parametrize(
    ("parallel", "worlds", "sources"),
    [
        ("{kind: fsdp, cpu_offload: true}", [3, 2, 4], ["snapshot", "snapshot"]),
        ("{kind: fsdp, cpu_offload: true, shard_size: 2}", [4, [2, 3], 4], ["rank 0", "rank 2"]),
    ],
)
def test_worlds_of_other_sizes_go_on_with_state_that_fsdp_keeps_in_the_hosts_memory(
    parallel: str, worlds: list[Members], sources: list[str], tmp_path: Path
) -> None:
    config = small(tmp_path, f"parallel={parallel}")
    run = drill(config, worlds=worlds, leave_after=[4, 4], patch=put_all_beyond_reach)
    check_run(run, reference(config))
    assert run.told("restore", "step") == [5, 10]
    assert run.told("restore", "source") == sources


FIRST = 5  # steps of the first epoch of a run that is extended: 55 samples, of which the last step has 3


def train(config: Config, worlds: Sequence[int], leave_after: Sequence[int] = ()) -> Drilled:
    """Do what the command does, with a drill in place of a launcher."""
    assert start_or_resume(config, RunDirectory.of(config), RunStarted(launcher="drill"), lambda line: None)
    return drill(config, worlds=worlds, leave_after=leave_after)


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.more)])
def test_an_extended_run_equals_one_process_that_leaves_no_sample_out(tmp_path: Path, kind: str) -> None:
    # A rate that the length has no part in.
    words = [f"parallel.kind={kind}", "schedule.kind=constant", "validation.every=1 epoch"]
    train(small(tmp_path, "run.epochs=1", *words), worlds=[2])
    train(small(tmp_path, "run.epochs=2", *words), worlds=[3, 2], leave_after=[2])
    last = small(tmp_path, "run.epochs=4", *words)
    run = train(last, worlds=[2])
    assert run.told("short_step", "position") == [55, 110]
    assert [line["num_samples"] for line in run.history.lines].count(3) == 2
    assert run.told("validation", "step") == [5, 10, 15, 19]  # the steps in which an epoch ends
    check_run(run, reference(last, ended_at=[1, 2]))


def test_a_short_step_that_is_done_again_is_as_short_as_it_was(tmp_path: Path) -> None:
    """Its checkpoint is gone, so the extended run goes on from the one before it."""
    words = ["schedule.kind=constant", "checkpoint.every=2 steps"]
    first = small(tmp_path, "run.epochs=1", *words)
    train(first, worlds=[2])
    directory = RunDirectory.of(first)
    directory.store.delete(path_of(FIRST))
    longer = small(tmp_path, "run.steps=9", *words)
    run = train(longer, worlds=[1])
    assert run.told("restore", "step") == [FIRST - 1]
    expected = reference(small(tmp_path, "run.epochs=2", *words), ended_at=[1])
    lines = run.history.committed
    assert [lines[step]["num_samples"] for step in range(1, 10)] == expected.num_samples[:9]
    assert [lines[step]["samples_digest"] for step in range(1, 10)] == [f"{d:016x}" for d in expected.digests[:9]]
    check_checkpoint(run)

    # In steps and back in epochs: two of them end where they would have without the nine steps.
    run = train(small(tmp_path, "run.epochs=2", *words), worlds=[2])
    check_weights(run, expected)
    assert run.told("short_step", "step") == [FIRST]
