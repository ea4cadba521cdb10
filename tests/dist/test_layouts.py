"""Each world has the layout that trains on most workers, and the state moves to it without a word of storage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.claims import check_run, check_weights
from tests.support.deaths import Plot, survive
from tests.support.drill import drill
from tests.support.like_nccl import Death
from tests.support.reference import reference
from tests.support.small import small

AUTO = ("parallel={kind: fsdp, shard_size: auto}",)
STAGES = ("parallel={kind: pipeline, stages: [2, 3]}", "model.num_layers=3")
TENSOR = ("parallel={kind: fsdp, shard_size: [1, 3], tensor_size: 2}", "model.attention_dropout=0")
STAGES_OF_PARTS = (
    "parallel={kind: pipeline, stages: [2, 3], tensor_size: 2}",
    "model.num_layers=3",
    "model.attention_dropout=0",
)
SLOW = pytest.mark.slow
# No step comes from storage, because nothing is written there.
NOTHING_STORED = ("run.steps=16", "checkpoint.every=1000 steps")


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        pytest.param(AUTO, [4, 3, 5, 4], id="fsdp"),  # 2 x 2, 1 x 3, 1 x 5, 2 x 2
        pytest.param(STAGES, [4, 3, 4], id="stages"),
        pytest.param(TENSOR, [2, 6, 4], id="tensor", marks=SLOW),
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
        pytest.param(AUTO, 4, 0, id="fsdp-leader"),
        pytest.param(AUTO, 4, 3, id="fsdp"),
        pytest.param(STAGES, 4, 1, id="stages"),
        pytest.param(AUTO, 8, 5, id="fsdp-eight", marks=SLOW),
        pytest.param(TENSOR, 4, 2, id="tensor", marks=SLOW),
        # Six of the seven that are left train, as 1 x 3 x 2.
        *(pytest.param(STAGES_OF_PARTS, 8, victim, id=f"stages-of-parts-{victim}", marks=SLOW) for victim in range(8)),
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
