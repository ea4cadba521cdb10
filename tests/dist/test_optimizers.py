"""Optimizers other than the default: what they hold survives resizes, stops and restarts as the weights do."""

from pathlib import Path

import pytest
import torch

from tests.support.claims import check_equal, check_identical, check_ledger, check_losses, check_run
from tests.support.drill import drill
from tests.support.gang import MemberFailed
from tests.support.reference import reference
from tests.support.small import small

HERE, OWN = "tests.dist.test_optimizers", "tests.support.optimizers"
SGD = ["optimizer.kind=sgd", "optimizer.lr=0.1", "optimizer.weight_decay=0.01"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("momentum", ["0.9", "0.0"])
def test_sgd_over_a_resize_equals_one_process(tmp_path: Path, kind: str, momentum: str) -> None:
    """And over a stop, from whose checkpoint others go on."""
    nesterov = str(momentum == "0.9").lower()
    words = [*SGD, f"optimizer.momentum={momentum}", f"optimizer.nesterov={nesterov}"]
    config = small(tmp_path, f"parallel.kind={kind}", *words)
    drill(config, worlds=[3, 2], leave_after=[5], stop_after=3)
    run = drill(config, worlds=[2])
    check_run(run, reference(config))
    assert bool(run.optimizer) == (momentum == "0.9"), "without momentum SGD has no state"


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_groups_with_rates_of_their_own_live_through_resizes_and_stops(tmp_path: Path, kind: str) -> None:
    groups = "[{match: embed, lr_scale: 0.5, weight_decay: 0.2}, {match: bias, lr_scale: 0.1}]"
    words = [f"parallel.kind={kind}", "optimizer.kind=adam", f"optimizer.groups={groups}", "schedule.kind=one_cycle"]
    undisturbed = drill(small(tmp_path / "undisturbed", *words), worlds=[3])
    config = small(tmp_path / "resized", *words)
    drill(config, worlds=[3, 2], leave_after=[3], stop_after=3)
    resized = drill(config, worlds=[3])
    check_equal(resized.weights, undisturbed.weights)
    check_equal(resized.optimizer, undisturbed.optimizer)


MUON = ["optimizer.kind=muon", "optimizer.lr=0.003"]


def test_muon_over_a_resize_is_equivalent_and_over_a_stop_identical(tmp_path: Path) -> None:
    undisturbed = drill(small(tmp_path / "whole", *MUON), worlds=[2])
    drill(small(tmp_path / "halves", *MUON), worlds=[2], stop_after=6)
    check_identical(drill(small(tmp_path / "halves", *MUON), worlds=[2]), undisturbed)
    resized = drill(small(tmp_path / "resized", *MUON), worlds=[3, 1], leave_after=[5])
    # Its update is computed in bf16, whatever the precision: a last bit here is an eighth bit there.
    losses = [run.summary["metrics"]["loss"] for run in (resized, undisturbed)]
    assert losses[0] == pytest.approx(losses[1], rel=0.002)
    held = {name.rpartition(".")[2] for name in undisturbed.optimizer}
    assert held == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
    by_muon = {name for name in undisturbed.optimizer if name.endswith("momentum_buffer")}
    assert len(by_muon) == 8  # four matrices in each of two blocks; embeddings and head are AdamW's


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["torch.optim:NAdam", "torch.optim:ASGD", f"{OWN}:TowardsStart"])
def test_optimizer_whose_state_does_not_begin_as_zeros_equals_one_process(tmp_path: Path, name: str, kind: str) -> None:
    """It is resized within warm-up, stopped, and resumed from its checkpoint by new processes."""
    config = small(tmp_path, f"parallel.kind={kind}", f"optimizer.target={name}", "optimizer.lr=0.003")
    drill(config, worlds=[3, 2], leave_after=[1], stop_after=5)
    check_run(drill(config, worlds=[3]), reference(config))


def test_rprop_resumes_exactly_and_is_refused_where_torch_does_not_run_it_on_shards(tmp_path: Path) -> None:
    words = ["optimizer.target=torch.optim:Rprop", "optimizer.lr=0.003"]
    config = small(tmp_path / "ddp", *words)
    drill(config, worlds=[3, 2], leave_after=[1], stop_after=5)
    resumed = drill(config, worlds=[3])
    # Not the weights: a key's bias has no gradient but rounding errors, whose sign moves it, and no loss depends on it.
    check_losses(resumed, reference(config))
    check_ledger(resumed, reference(config))
    sharded = small(tmp_path / "fsdp", *words, "parallel.kind=fsdp")
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15):
        check_losses(drill(sharded, worlds=[2]), reference(sharded))
        return
    refusal = r"optimizer Rprop cannot update parameters that fsdp has sharded \(take par"
    with pytest.raises(MemberFailed, match=refusal):
        drill(sharded, worlds=[2])


def test_optimizer_without_state_goes_on_with_shards_in_memory(tmp_path: Path) -> None:
    words = ["parallel={kind: fsdp, shard_size: 2}", f"optimizer.target={OWN}:Plainest", "optimizer.lr=0.003"]
    run = drill(small(tmp_path, *words), worlds=[range(4), range(2)], leave_after=[5])
    check_run(run, reference(small(tmp_path, *words)))
    assert not run.optimizer
