"""Activation checkpointing: activations that are computed again are the ones that were thrown away."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor, nn

from tests.dist.checks import check_run
from tests.dist.drill import drill
from tests.dist.reference import reference
from tests.dist.small import VOCABULARY, small


class Layers(nn.Module):
    """Two like layers, whose statistics of their inputs every forward in training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.layers = nn.ModuleList([nn.Sequential(nn.BatchNorm1d(12), nn.Conv1d(12, 12, 1)) for _ in range(2)])
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens).transpose(1, 2)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden.transpose(1, 2))
        return logits


@pytest.mark.parametrize("how", ["full", "selective", "2"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_with_dropout_and_resizes_the_result_is_that_without(tmp_path: Path, kind: str, how: str) -> None:
    words = [f"parallel.kind={kind}", f"memory.activation_checkpointing={how}"]
    run = drill(small(tmp_path, *words), worlds=[3, 1, 2], leave_after=[4, 4])
    check_run(run, reference(small(tmp_path, f"parallel.kind={kind}")))


def test_running_statistics_learn_once_from_a_microbatch(tmp_path: Path) -> None:
    words = ["model.target=tests.dist.test_activations:Layers", "memory.activation_checkpointing=full"]
    run = drill(small(tmp_path, *words), worlds=[2])
    check_run(run, reference(small(tmp_path, *words[:1])))
