"""Activation checkpointing: activations that are computed again are the ones that were thrown away."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tests.examples.operators  # noqa: F401 - before torchvision
from steadfast.parallel.activations import checkpoint_activations
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


def language_model(model: Any) -> Tensor:
    tokens = torch.arange(32).reshape(2, 16)
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def image_model(model: Any) -> Tensor:
    logits: Tensor = model(torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32))
    return logits.square().mean()


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=True))


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=32, n_embd=32, n_layer=3, n_head=4))


def resnet50() -> Any:
    from torchvision.models import resnet50

    return resnet50()


def vit() -> Any:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 3, 4, 32, 64)


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize(
    ("build", "loss"), [(llama, language_model), (gpt2, language_model), (resnet50, image_model), (vit, image_model)]
)
def test_gradients_of_models_that_nobody_here_wrote(
    build: Callable[[], nn.Module], loss: Callable[[nn.Module], Tensor]
) -> None:
    plain = build().train()
    for how in ("full", "selective"):
        other = copy.deepcopy(plain)
        checkpoint_activations(other, how)
        for model in (plain, other):
            model.zero_grad()
            torch.manual_seed(0)  # of dropout
            loss(model).backward()
        for (name, ours), theirs in zip(other.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, msg=f"{how}: {name}")
