"""Activation checkpointing: activations that are computed again are the ones that were thrown away."""

import copy
from pathlib import Path

import pytest
import torch

from steadfast.parallel.activations import checkpoint_activations
from tests.dist.test_models_nobody_here_wrote import CASES, some_inputs
from tests.support.claims import check_run
from tests.support.drill import drill
from tests.support.gang import MemberFailed
from tests.support.reference import reference
from tests.support.small import small


@pytest.mark.parametrize("how", ["full", "selective", "2"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_with_dropout_and_resizes_the_result_is_that_without(tmp_path: Path, kind: str, how: str) -> None:
    words = [f"parallel.kind={kind}", f"memory.activation_checkpointing={how}"]
    run = drill(small(tmp_path, *words), worlds=[3, 1, 2], leave_after=[4, 4])
    check_run(run, reference(small(tmp_path, f"parallel.kind={kind}")))


@pytest.mark.parametrize("wrap", ["30", "[Linear]"])
def test_layers_that_keep_a_part_are_gathered_as_a_whole(tmp_path: Path, wrap: str) -> None:
    words = [f"parallel={{kind: fsdp, wrap: {wrap}}}", "memory.activation_checkpointing=selective"]
    with pytest.raises(MemberFailed, match=r"UsageError: .*selective: parallel\.wrap gathers .*take full"):
        drill(small(tmp_path, *words), worlds=[1])
    whole = "parallel={kind: fsdp, wrap: [Block]}"
    check_run(drill(small(tmp_path, whole, words[1]), worlds=[2]), reference(small(tmp_path)))


def test_running_statistics_learn_once_from_a_microbatch(tmp_path: Path) -> None:
    words = ["model.target=tests.support.models:Layers", "memory.activation_checkpointing=full"]
    run = drill(small(tmp_path, *words), worlds=[2])
    check_run(run, reference(small(tmp_path, *words[:1])))


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_models_that_nobody_here_wrote(name: str) -> None:
    case = CASES[name]
    plain = case.model().double().train()
    for how in ("full", "selective"):
        other = copy.deepcopy(plain)
        checkpoint_activations(other, how)
        for model in (plain, other):
            model.zero_grad()
            torch.manual_seed(0)  # of dropout
            inputs = some_inputs(case.inputs)
            loss = model(inputs, labels=inputs).loss if case.inputs == "tokens" else model(inputs).square().mean()
            loss.backward()
        for (name, ours), theirs in zip(other.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, msg=f"{how}: {name}")
