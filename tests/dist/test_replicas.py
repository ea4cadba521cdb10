"""Whole replicas come and go, and layouts change: what one has lost another gives, without a word of storage."""

from pathlib import Path

import pytest
from torch import nn

from steadfast.checkpoint.catalog import Catalog
from steadfast.checkpoint.state import State, flatten, newest_whole
from steadfast.checkpoint.weights import read_whole
from steadfast.loop.worker_state import WorkerState
from steadfast.parallel import Parallel
from steadfast.parallel.dtensor import local
from steadfast.storage import LocalStore
from steadfast.world.runtime import World
from tests.support.claims import check_equal, check_identical, check_run, check_weights
from tests.support.deaths import SEEDS, Plot, plot_replicas, survive, with_a_death_in_connect
from tests.support.drill import Members, drill
from tests.support.like_nccl import Death
from tests.support.reference import reference
from tests.support.small import small

Words = tuple[str, ...]

HSDP = ("parallel={kind: fsdp, shard_size: 2}",)
STAGES = ("parallel={kind: pipeline, stages: 2}",)
TENSOR = ("parallel={kind: fsdp, shard_size: 1, tensor_size: 2}", "model.attention_dropout=0")
PARTS_IN_STAGES = ("parallel={kind: pipeline, stages: 2, tensor_size: 2}", "model.attention_dropout=0")
SELDOM = pytest.mark.parametrize(
    "words", [HSDP, STAGES, pytest.param(TENSOR, marks=pytest.mark.slow)], ids=["hsdp", "stages", "tensor"]
)
NUM_COLLECTIVES = 150  # of some steps
NUM_COMMUNICATORS = 3  # of a rank, or more: of the world, across replicas and within its own
NAMES = "resized", "undisturbed"


@pytest.mark.parametrize(
    ("steps", "shard", "expected"),
    [
        ([5, 5], 1, 5),
        ([5, 0], 1, 5),
        ([5, 0], 2, 0),
        ([5, 4], 2, 0),
        ([5, 5, 5, 0], 2, 5),
        ([5, 0, 0, 5], 2, 5),
        ([5, 4, 4, 4], 2, 4),
        ([6, 4, 5, 4, 4, 5], 2, 5),
        ([0, 0], 2, 0),
    ],
)
def test_a_step_is_whole_where_each_part_of_it_is_held(steps: list[int], shard: int, expected: int) -> None:
    assert newest_whole(steps, shard) == expected


def hold_still() -> None:
    """Have a worker that goes on with its shards fail if they are moved: there may be no room for two copies."""
    honest = WorkerState._prepare_shards

    def prepare(self: WorkerState, world: World, parallel: Parallel) -> tuple[nn.Module, State]:
        held = self._shards.state["optimizer"] if self._shards and self._goes_on_with_shards else {}
        places = {name: local(tensor).data_ptr() for name, tensor in flatten(held).items() if "exp_avg" in name}
        model, state = honest(self, world, parallel)
        now = flatten(state["optimizer"])
        assert all(local(now[name]).data_ptr() == place for name, place in places.items())
        return model, state

    WorkerState._prepare_shards = prepare


@pytest.mark.parametrize(
    ("worlds", "sources"),
    [
        ([4, 2, 4], ["rank 0", "rank 0"]),
        ([4, [2, 3], 4], ["rank 0", "rank 2"]),  # the first replica goes and comes back, five steps behind
        ([4, [0, 3], 4], ["rank 0", "rank 0"]),  # one of each replica: together they have all
        ([4, [1, 0], 4], ["snapshot", "snapshot"]),  # each is to hold the other's part
        ([2, [4, 5, 0, 1, 2, 3], [5, 0]], ["rank 2", "snapshot"]),  # three replicas
    ],
    ids=str,
)
@SELDOM
def test_replicas_give_their_state(worlds: list[Members], sources: list[str], words: Words, tmp_path: Path) -> None:
    """The last checkpoint is written by the first replica alone."""
    config = small(tmp_path, *words)
    run = drill(config, worlds=worlds, leave_after=[4, 4])
    check_run(run, reference(config))
    assert run.told("restore", "step") == [5, 10]
    assert run.told("restore", "source") == sources
    (last,) = (tmp_path / config.run.name / "checkpoints").glob("step-*14")
    assert sorted(path.name.split("-rank-")[1][:5] for path in last.glob("*.safetensors")) == ["00000", "00001"]


@SELDOM
def test_moments_loss_scale_and_averages_are_brought_along_bit_by_bit(words: Words, tmp_path: Path) -> None:
    words = (*words, "precision.kind=fp16", "hooks=[{kind: ema, decay: 0.5}]")
    resized = drill(small(tmp_path / NAMES[0], *words), worlds=[4, 4, 4], leave_after=[4, 4], patch=hold_still)
    undisturbed = drill(small(tmp_path / NAMES[1], *words), worlds=[4])
    check_identical(resized, undisturbed)
    averages = [read_whole(Catalog(LocalStore(tmp_path / name / "small")), 14, "hooks") for name in NAMES]
    check_equal(*averages)
    assert resized.told("restore", "source") == ["rank 0", "rank 0"]


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 24))])
@SELDOM
def test_no_death_costs_a_step_or_leaves_garbage(seed: int, words: Words, tmp_path: Path) -> None:
    """Nothing is copied or stored meanwhile: survivors hold all, of whatever replica each is."""
    check_deaths(tmp_path, words, plot_replicas(seed, NUM_COLLECTIVES), size=2)


@pytest.mark.parametrize("seed", SEEDS)
@SELDOM
def test_no_death_while_replicas_connect_ends_the_run(seed: int, words: Words, tmp_path: Path) -> None:
    plotted = with_a_death_in_connect(plot_replicas(seed, NUM_COLLECTIVES), seed, NUM_COMMUNICATORS)
    check_deaths(tmp_path, words, plotted)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_no_death_in_stages_of_parts_costs_a_step_or_leaves_garbage(seed: int, tmp_path: Path) -> None:
    check_deaths(tmp_path, PARTS_IN_STAGES, plot_replicas(seed, NUM_COLLECTIVES, size=4), size=4)


def check_deaths(storage: Path, words: Words, plotted: Plot, size: int | None = None) -> None:
    """Claim: the result is right. With the `size` of a replica, no step is done twice."""
    config = small(storage, *words, "run.steps=24", "checkpoint.every=1000 steps", "checkpoint.node_memory=false")
    run = survive(config, plotted).left
    check_weights(run, reference(config))
    assert sorted(run.history.committed) == [*range(1, 25)]
    if size and not takes_the_last_of_a_part(plotted, size):
        assert [line["step"] for line in run.history.lines] == [*range(1, 25)]


def takes_the_last_of_a_part(plotted: Plot, size: int) -> bool:
    """Whether somebody may die while the newcomer is given the part that nobody else has any more."""
    for attempt, (victim, _) in plotted.deaths.items():
        world = plotted.worlds[attempt - 1]
        for place, member in enumerate(world):
            is_new = attempt > 1 and member not in plotted.worlds[attempt - 2]
            if is_new and member != victim and place % size == world.index(victim) % size:
                return True
    return False


AUTO = ("parallel={kind: fsdp, shard_size: auto}",)
THREE_LAYERS = ("parallel={kind: pipeline, stages: [2, 3]}", "model.num_layers=3")
SHARDED_PARTS = ("parallel={kind: fsdp, shard_size: [1, 3], tensor_size: 2}", "model.attention_dropout=0")
STAGES_OF_PARTS = (
    "parallel={kind: pipeline, stages: [2, 3], tensor_size: 2}",
    "model.num_layers=3",
    "model.attention_dropout=0",
)
# No step comes from storage, because nothing is written there.
NOTHING_STORED = ("run.steps=16", "checkpoint.every=1000 steps")


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        pytest.param(AUTO, [4, 3, 5, 4], id="fsdp", marks=pytest.mark.more),  # 2 x 2, 1 x 3, 1 x 5, 2 x 2
        pytest.param(THREE_LAYERS, [4, 3, 4], id="stages"),
        pytest.param(SHARDED_PARTS, [2, 6, 4], id="tensor", marks=pytest.mark.slow),
    ],
)
def test_a_planned_change_of_layout_costs_no_step(words: tuple[str, ...], sizes: list[int], tmp_path: Path) -> None:
    config = small(tmp_path, *words)
    run = drill(config, worlds=sizes, leave_after=[3] * (len(sizes) - 1))
    check_run(run, reference(config))
    assert set(run.told("restore", "source")) <= {"snapshot", "rank 0"}


@pytest.mark.parametrize(
    ("words", "size", "victim"),
    [
        pytest.param(AUTO, 4, 0, id="fsdp-leader", marks=pytest.mark.slow),
        pytest.param(AUTO, 4, 3, id="fsdp"),
        pytest.param(THREE_LAYERS, 4, 1, id="stages"),
        pytest.param(AUTO, 8, 5, id="fsdp-eight", marks=pytest.mark.slow),
        pytest.param(SHARDED_PARTS, 4, 2, id="tensor", marks=pytest.mark.slow),
        # Six of the seven that are left train, as 1 x 3 x 2.
        *(pytest.param(STAGES_OF_PARTS, 8, at, id=f"parts-{at}", marks=pytest.mark.slow) for at in range(8)),
    ],
)
def test_all_others_train_on_after_a_death(words: tuple[str, ...], size: int, victim: int, tmp_path: Path) -> None:
    config = small(tmp_path, *words, *NOTHING_STORED)
    left = [member for member in range(size) if member != victim]
    # One that is left over is not the other holder of the victim's part, whom the coordinator seats.
    twin = (victim + size // 2) % size
    while len(left) > config.parallel.layout(size - 1).size:
        left.remove(max(member for member in left if member != twin))
    deaths = {1: (victim, Death(150, "while it runs"))}
    run = survive(config, Plot([list(range(size)), left], deaths)).left
    check_weights(run, reference(config))
    assert [line["step"] for line in run.history.lines] == list(range(1, 17))
    assert run.told("restore", "source") == ["snapshot"]
