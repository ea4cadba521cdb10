"""Nothing that a dead peer had a hand in reaches weights, metrics or checkpoints, on a communicator like NCCL's."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import steadfast.parallel.buckets
from steadfast.checkpoint.catalog import Catalog
from steadfast.checkpoint.weights import read_whole
from steadfast.config import Config
from steadfast.parallel.precision import Precision
from steadfast.run.directory import RunDirectory
from steadfast.world.groups import Groups
from tests.support.claims import EQUAL, check_checkpoint, check_equal, check_weights
from tests.support.deaths import (
    SEEDS,
    Plot,
    Survived,
    Undisturbed,
    plot,
    survive,
    undisturbed,
    validation_losses,
    with_a_death_in_connect,
)
from tests.support.gang import MemberFailed
from tests.support.history import History
from tests.support.like_nccl import Death
from tests.support.reference import Reference, reference
from tests.support.small import small

# Collectives of an attempt's first steps, with the broadcasts to a newcomer before them.
NUM_COLLECTIVES = {"ddp": 110, "fsdp": 45}


def config_of(storage: Path, kind: str, *overrides: str) -> Config:
    words = [f"parallel.kind={kind}", "run.steps=24", "validation.every=3 steps", "checkpoint.every=4 steps"]
    return small(storage, *words, *overrides)


def several_buckets() -> None:
    """Cut the small model's gradients into about nine buckets."""
    steadfast.parallel.buckets._FIRST_BYTES = 2048
    steadfast.parallel.buckets._CAP_BYTES = 4096


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def calm(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed(config_of(tmp_path_factory.mktemp("undisturbed"), kind), several_buckets)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_death_leaves_garbage(tmp_path: Path, kind: str, calm: Undisturbed, seed: int) -> None:
    config = config_of(tmp_path, kind)
    check(config, survive(config, plot(seed, NUM_COLLECTIVES[kind]), several_buckets), calm)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_death_while_a_world_connects_ends_the_run(tmp_path: Path, kind: str, calm: Undisturbed, seed: int) -> None:
    config = config_of(tmp_path, kind)
    plotted = with_a_death_in_connect(plot(seed, NUM_COLLECTIVES[kind]), seed)
    check(config, survive(config, plotted, several_buckets), calm)


@pytest.mark.parametrize(
    ("parallel", "worlds"),
    [
        ("{kind: fsdp}", [[0, 1, 2, 3], [0, 1, 2], [0, 1], [0, 4, 5, 6]]),
        ("{kind: fsdp, shard_size: 2}", [[0, 1, 2, 3], [0, 1], [0, 2, 4, 5]]),  # 2 waits for another half meanwhile
        ("{kind: pipeline, stages: 2}", [[0, 1, 2, 3], [0, 1], [0, 2, 4, 5]]),
        ("{kind: fsdp, shard_size: 1, tensor_size: 2}", [[0, 1, 2, 3], [0, 1], [0, 2, 4, 5]]),
        pytest.param(
            "{kind: pipeline, stages: 2, tensor_size: 2}",
            [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3], [0, 1, 2, 4, 5, 6, 8, 9]],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_sharded_worlds_shrink_and_grow_without_storage(tmp_path: Path, parallel: str, worlds: list[list[int]]) -> None:
    words = ["model.attention_dropout=0"] if "tensor_size" in parallel else []
    config = small(tmp_path, f"parallel={parallel}", *words, "run.steps=40", "checkpoint.every=1000 steps")
    # Parts of layers are summed in every forward, and copies in memory take some steps.
    collective = 600 if words else 80
    deaths = {number: (world[-1], Death(collective, "while it runs")) for number, world in enumerate(worlds[:-1], 1)}
    run = survive(config, Plot(worlds, deaths)).left
    check_weights(run, reference(config))
    assert {line["attempt"] for line in run.history.lines} == set(range(1, len(worlds) + 1))
    assert len(run.told("restore", "source")) == len(worlds) - 1
    assert "checkpoint" not in run.told("restore", "source")
    assert run.told("checkpoint", "step") == [40]


def check(config: Config, survived: Survived, calm: Undisturbed) -> None:
    for each in survived.held:
        if each.step:
            check_equal(each.state.weights, calm.states[each.step].weights)
            # Until the first death the run was the undisturbed one, to the bit.
            if each.attempt == 2:
                assert each.state.digest == calm.states[each.step].digest
    digests: dict[tuple[int, int], set[str]] = {}
    for each in survived.held:
        digests.setdefault((each.attempt, each.step), set()).add(each.state.digest)
    assert all(len(alike) == 1 for alike in digests.values()), "survivors at the same step hold different states"
    expected = reference(config)
    check_weights(survived.left, expected)
    check_checkpoint(survived.left)
    check_committed(survived.left.history, expected)
    catalog = Catalog(RunDirectory.of(config).store)
    for step in catalog.steps():
        if catalog.manifest(step) is None:  # its leader was killed while it was written
            continue
        check_equal(read_whole(catalog, step), calm.states[step].weights)
    for step, loss in validation_losses(RunDirectory.of(config)).items():
        assert loss == pytest.approx(calm.validation[step], abs=EQUAL)


def check_committed(history: History, expected: Reference) -> None:
    """Claim: each step counts once, with its samples and its loss; of one that a dead leader told, no loss is known."""
    lines = [history.committed[step] for step in sorted(history.committed)]
    assert [line["step"] for line in lines] == list(range(1, len(expected.losses) + 1))
    for line, num_samples, digest, loss in zip(
        lines, expected.num_samples, expected.digests, expected.losses, strict=True
    ):
        if line.get("confirmed", True):
            assert (line["num_samples"], line["samples_digest"]) == (num_samples, f"{digest:016x}")
            assert line["loss"] == pytest.approx(loss, abs=EQUAL)


def without_a_gate() -> None:
    several_buckets()
    Groups.gate = lambda self: self.communicator.synchronize()


def with_the_flag_set_after_the_abort() -> None:
    several_buckets()

    def abort(self: Groups) -> None:
        self.communicator.abort()
        time.sleep(0.2)
        self.aborted.set()

    Groups.abort = abort


def with_a_collective_after_the_gate() -> None:
    several_buckets()
    honest = Precision.update

    def update(self: Precision, optimizer: torch.optim.Optimizer, grad_norm: torch.Tensor) -> bool:
        communicator = current[-1].communicator
        for group in optimizer.param_groups:
            for param in group["params"]:
                communicator.broadcast(param.grad, 0)  # of what is equal on all ranks
        communicator.wait()
        return honest(self, optimizer, grad_norm)

    current: list[Groups] = []
    gate = Groups.gate

    def noted(self: Groups) -> None:
        current.append(self)
        gate(self)

    Groups.gate = noted
    Precision.update = update


@pytest.mark.parametrize("kind", ["ddp"], indirect=True)
@pytest.mark.parametrize(
    "mutation", [without_a_gate, with_the_flag_set_after_the_abort, with_a_collective_after_the_gate]
)
def test_what_lets_garbage_in_is_noticed(tmp_path: Path, calm: Undisturbed, mutation: Callable[[], None]) -> None:
    """Of a few plots, at least one shows it."""
    for seed in range(6):
        config = config_of(tmp_path / str(seed), "ddp")
        try:
            check(config, survive(config, plot(seed, NUM_COLLECTIVES["ddp"]), mutation), calm)
        except (AssertionError, MemberFailed):
            return
    pytest.fail("no plot shows it")
