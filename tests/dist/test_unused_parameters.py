"""A parameter that no worker uses in a step is left alone by the optimizer, as in a plain loop."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from steadfast.hooks.hook import HookContext
from tests.support.claims import check_run
from tests.support.drill import drill
from tests.support.gang import MemberFailed
from tests.support.models import Embedded
from tests.support.reference import reference
from tests.support.small import small

COUPLED = "task.coupled=true"  # which layers a forward runs follows from all samples of its microbatch
HERE = "tests.dist.test_unused_parameters"
NUM_EXPERTS = 5


class Block(nn.Module):
    """Chooses one of its experts for each microbatch: half of the time at random, else by its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(12, 12) for _ in range(NUM_EXPERTS)])
        self.norm = nn.LayerNorm(12)

    def forward(self, hidden: Tensor, number: int) -> Tensor:
        if self.training and number % 2:
            number = int(torch.randint(NUM_EXPERTS, ()))
        mixed: Tensor = self.experts[number % NUM_EXPERTS](self.norm(hidden))
        return hidden + torch.tanh(mixed)


class Half(Embedded):
    """A model with blocks, whose own embedding is a part of the halves' alternation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def between(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, int(tokens.sum()))
        return hidden


class Alternating(nn.Module):
    """Two models that are trained in turns, as the two of a GAN are, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleDict({"even": Half(), "odd": Half()})
        self.never = nn.Linear(12, 12)
        self.turn = "odd"

    def blocks(self) -> Iterator[nn.Module]:
        for half in self.halves.values():
            yield from half.layers  # type: ignore[misc]

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.halves[self.turn if self.training else "even"](tokens)
        return logits


def take_turn(model: nn.Module, step: int) -> None:
    model.turn = "odd" if step % 2 else "even"  # type: ignore[assignment]


class Turns:
    """Sets whose turn it is in the next step."""

    def on_start(self, run: HookContext) -> None:
        take_turn(run.model, run.step + 1)

    on_step = on_start


@pytest.mark.parametrize(
    ("words", "worlds"),
    [
        (["parallel.kind=ddp"], [1, 4, 2, 3]),
        (["run.exact=true", "run.deterministic=true"], [3, 1, 4, 2]),
        (["parallel.reducer=torch"], [1, 4, 2, 3]),
        (["parallel.kind=data_parallel", "scaling.num_workers=1"], [1]),
        (["parallel.kind=fsdp"], [1, 4, 2, 3]),
        (["parallel={kind: fsdp, reduce_every_microbatch: true}"], [3, 1, 4, 2]),
        (["parallel={kind: fsdp, reshard_after_forward: false, cpu_offload: true}"], [2, 3]),
        (["parallel={kind: fsdp, shard_size: 2}"], [2, 4]),
        (["parallel={kind: fsdp, shard_size: 2, reduce_every_microbatch: true}"], [4, 2]),
    ],
    ids=["ddp", "exact", "torch", "data_parallel", "fsdp", "every", "offload", "hsdp", "hsdp_every"],
)
def test_unused_parameters_are_left_alone_as_in_a_plain_loop(
    tmp_path: Path, words: list[str], worlds: list[int]
) -> None:
    """Three microbatches of a step use three experts of five at most; one worker of four, or of two, runs a pad."""
    model = f"model.target={HERE}:Alternating"
    turns = f"hooks=[{{target: '{HERE}:Turns'}}]"
    optimizer = "optimizer={kind: adamw, lr: 1.0e-2, weight_decay: 0.3, betas: [0.8, 0.9], max_grad_norm: 0.5}"
    config = small(tmp_path, model, turns, optimizer, "batch.global_size=5", COUPLED, *words)
    check_run(drill(config, worlds, leave_after=[2] * (len(worlds) - 1)), reference(config, before_step=take_turn))


def test_fsdp_adds_up_microbatches_of_different_experts_in_16_bits(tmp_path: Path) -> None:
    """Gradients of earlier microbatches are kept in fp32 then, and those of the last one come in bf16."""
    config = small(tmp_path, f"model.target={HERE}:Alternating", "parallel.kind=fsdp", "precision.kind=bf16", COUPLED)
    found = drill(config, [2, 1], leave_after=[4])
    expected = reference(config)
    assert [line["loss"] for line in found.history.lines] == pytest.approx(expected.losses, abs=0.05)
    assert found.weights["never.weight"].double().equal(expected.weights["never.weight"].float().double())


class Scattered(Embedded):
    """Has experts that fsdp gathers one by one, and runs one of them for each microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(12, 12) for _ in range(NUM_EXPERTS)])

    def between(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        mixed: Tensor = self.experts[int(tokens.sum()) % NUM_EXPERTS](hidden)
        return hidden + mixed


@pytest.mark.parametrize("parallel", ["{kind: fsdp}", "{kind: fsdp, shard_size: 2}"])
def test_fsdp_refuses_ranks_that_run_different_layers(tmp_path: Path, parallel: str) -> None:
    """Layers of one size are taken for each other otherwise, without any error of torch's."""
    config = small(tmp_path, f"model.target={HERE}:Scattered", f"parallel={parallel}", COUPLED)
    with pytest.raises(MemberFailed, match=r"TrainingError: .*the ranks did not run the same layers in one step"):
        drill(config, [2])


def test_fsdp_trains_experts_that_are_gathered_with_the_model(tmp_path: Path) -> None:
    config = small(tmp_path, f"model.target={HERE}:Scattered", "parallel={kind: fsdp, wrap: [Embedding]}", COUPLED)
    check_run(drill(config, [2, 3], leave_after=[4]), reference(config))
