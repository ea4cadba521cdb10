"""Samples that are no tuples of tensors, over a whole run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from steadfast.data.batches import Batch
from steadfast.tasks import IGNORED, LanguageModeling, Sums
from tests.support.claims import check_equal, check_identical, check_ledger
from tests.support.drill import drill
from tests.support.gang import MemberFailed
from tests.support.reference import expected_ledger
from tests.support.small import VOCABULARY, Tokens, small


class NamedTokens(Tokens):
    """The same tokens, as Hugging Face's datasets hold them."""

    def __getitem__(self, index: int, /) -> Any:
        inputs, targets = super().__getitem__(index)
        return {"tokens": inputs, "nested": (f"line {index}", {"targets": targets})}


class NamedLanguageModeling(LanguageModeling):
    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        assert batch["nested"][0][0].startswith("line ")
        return super().loss(model, (batch["tokens"], batch["nested"][1]["targets"]))


def test_batches_of_any_shape_go_through_a_whole_run(tmp_path: Path) -> None:
    plain = drill(small(tmp_path / "plain"), worlds=[2, 3], leave_after=[4])
    here = "tests.dist.test_batches"
    words = [f"data.target={here}:NamedTokens", f"task.target={here}:NamedLanguageModeling"]
    named = drill(small(tmp_path / "named", *words), worlds=[2, 3], leave_after=[4])
    check_identical(named, plain)
    assert [line["samples_digest"] for line in named.history.lines] == [
        line["samples_digest"] for line in plain.history.lines
    ]


class RaggedTexts:
    """Texts of two to seven tokens, as mappings."""

    def __len__(self) -> int:
        return 61

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        return {"tokens": torch.arange(index, index + 2 + index % 6) % VOCABULARY, "name": f"text {index}"}


def padded(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """What a user gives as data.collate: texts padded to the longest, where nothing is to be predicted."""
    tokens = pad_sequence([sample["tokens"] for sample in samples], batch_first=True, padding_value=IGNORED)
    return {"tokens": tokens.clamp(min=0), "labels": tokens}


class NamedModel(nn.Module):
    """Takes a batch by name, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(tokens))
        return logits


def test_ragged_samples_with_a_function_that_pads_them_are_used_once_over_changes_of_the_world(tmp_path: Path) -> None:
    here = "tests.dist.test_batches"
    words = [
        f"data.target={here}:RaggedTexts",
        f"data.collate={{target: '{here}:padded'}}",
        f"data.validation.collate={{target: '{here}:padded'}}",
        f"model.target={here}:NamedModel",
        "run.epochs=3",
    ]
    config = small(tmp_path / "changing", *words)
    run = drill(config, worlds=[2, 1, 3], leave_after=[4, 4])
    check_ledger(run, expected_ledger(config))
    check_equal(run.weights, drill(small(tmp_path / "alone", *words), worlds=[1]).weights)


def test_samples_that_validation_cannot_stack_are_told_before_the_first_step(tmp_path: Path) -> None:
    here = "tests.dist.test_batches"
    words = [f"data.target={here}:RaggedTexts", f"model.target={here}:NamedModel"]
    with pytest.raises(MemberFailed, match=r"DataError: data\.validation\.collate is missing"):
        drill(small(tmp_path, *words, f"data.collate={{target: '{here}:padded'}}"), worlds=[2])
    assert not list(tmp_path.rglob("step-*"))
