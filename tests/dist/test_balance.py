"""Workers of unequal speed, in whole runs: microbatches go to the faster ones, and nothing else changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import steadfast.balance.shares
from steadfast.config import Config
from steadfast.run.ledger import read_shares
from steadfast.world.runtime import World
from tests.support import mutations
from tests.support.claims import check_ledger, check_run
from tests.support.drill import Drilled, drill
from tests.support.gang import MemberFailed
from tests.support.reference import reference
from tests.support.small import small

# Sleep is most of a microbatch, so that a busy machine, which adds to both, leaves the one slower by far.
UNEQUAL = "faults.inject=[{kind: slow_at, ranks: [0], ms: 20}, {kind: slow_at, ranks: [1], ms: 66}]"
FAST = "faults.inject=[{kind: slow_at, ranks: [1], ms: 25}]"
NUM_STEPS = 28


def unequal(storage: Path, *overrides: str) -> Config:
    """Sixteen microbatches, the last one short; a microbatch of rank 1 takes about three times as long."""
    batch = ["batch.global_size=31", "batch.microbatch_size=2", "batch.balance=speed", f"run.steps={NUM_STEPS}"]
    return small(storage, *batch, UNEQUAL, *overrides)


def shares_of(run: Drilled) -> list[tuple[int, ...]]:
    """Of each step, as the ledger has them."""
    return [tuple(read_shares(line) or ()) for line in run.history.lines]


def told(run: Drilled) -> list[dict[str, Any]]:
    return [event for event in run.events if event["event"] == "shares"]


@pytest.mark.parametrize(
    "loader",
    [
        pytest.param(("data.num_workers=0",), marks=pytest.mark.slow),
        ("data.num_workers=2", "data.prefetch_factor=3"),
    ],
)
def test_a_slow_worker_is_given_less_and_the_result_is_the_same(tmp_path: Path, loader: tuple[str, ...]) -> None:
    config = unequal(tmp_path, *loader)
    run = drill(config, worlds=[2])
    check_run(run, reference(config))
    shares, event = shares_of(run), told(run)[0]
    assert shares[0] == (8, 8)
    assert shares[-1] in ((11, 5), (12, 4), (13, 3))
    assert shares[event["step"] - 2 : event["step"]] == [(8, 8), tuple(event["after"])]


def test_a_worker_that_recovers_is_given_its_part_again(tmp_path: Path) -> None:
    slow = "{kind: slow_at, ranks: [0, 2], ms: 20}, {kind: slow_at, ranks: [1], ms: 66, until: 30}, "
    slow += "{kind: slow_at, ranks: [1], ms: 20, step: 30}"
    config = unequal(tmp_path, f"faults.inject=[{slow}]", "run.steps=70")
    run = drill(config, worlds=[3])
    check_run(run, reference(config))
    shares = shares_of(run)
    assert shares[28][1] < 4 <= shares[-1][1]


def test_shares_begin_anew_with_each_world_and_checkpoints_do_not_disturb_them(tmp_path: Path) -> None:
    config = unequal(tmp_path, "checkpoint.every=1 steps", "run.steps=46")
    run = drill(config, worlds=[2, 3], leave_after=[20])
    check_run(run, reference(config))
    shares = shares_of(run)
    assert shares[19] in ((11, 5), (12, 4), (13, 3))
    assert shares[22] == (6, 5, 5)
    assert shares[-1][1] < 4


def test_sharded_workers_stay_even_and_say_so(tmp_path: Path) -> None:
    config = unequal(tmp_path, FAST, "parallel.kind=fsdp", "run.steps=14")
    run = drill(config, worlds=[2])
    check_run(run, reference(config))
    assert set(shares_of(run)) == {(8, 8)}
    assert [(event["after"], event["parallel"]) for event in told(run)] == [([8, 8], "fsdp")]


def label_by_rank() -> None:
    """What the machine's environment would say: the first worker is a fast one, all others are slow."""
    honest = steadfast.balance.shares._labels

    def labels(world: World, device: torch.device) -> list[tuple[str, ...]]:
        os.environ["STEADFAST_LABEL"] = "zone-b,slow" if world.rank else "fast"
        return honest(world, device)

    steadfast.balance.shares._labels = labels


def test_weights_by_label_hold_from_the_first_step(tmp_path: Path) -> None:
    config = unequal(tmp_path, FAST, "batch.balance={fast: 2, slow: 1}", "run.steps=14")
    run = drill(config, worlds=[3], patch=label_by_rank)
    check_run(run, reference(config))
    assert set(shares_of(run)) == {(8, 4, 4)}
    assert told(run)[0]["weights"] == [2, 1, 1]


def test_a_worker_without_a_weight_is_one_clear_error(tmp_path: Path) -> None:
    config = unequal(tmp_path, "batch.balance={A100: 2, T4: 1}")
    with pytest.raises(MemberFailed, match="worker 0 is labelled cpu, and the weights are for A100, T4"):
        drill(config, worlds=[2])


def test_even_shares_take_no_times_and_send_none(tmp_path: Path) -> None:
    config = unequal(tmp_path, FAST, "batch.balance=even", "run.steps=14")
    run = drill(config, worlds=[2], patch=mutations.refuse_to_take_times)
    assert set(shares_of(run)) == {(8, 8)}
    assert told(run) == []


def test_shares_that_change_too_early_are_noticed(tmp_path: Path) -> None:
    """A loader that has read ahead must not be overtaken: the plan refuses."""
    config = unequal(tmp_path, FAST, "data.num_workers=2")
    with pytest.raises(MemberFailed, match="has been read"):
        drill(config, worlds=[2], patch=mutations.forget_what_loaders_have_read)


def test_ranks_that_plan_differently_are_noticed(tmp_path: Path) -> None:
    config = unequal(tmp_path, FAST)
    try:
        run = drill(config, worlds=[2], patch=mutations.reshare_one_step_later_on_rank_1, audited=False)
    except MemberFailed:
        return
    with pytest.raises(AssertionError):
        check_ledger(run, reference(config))
