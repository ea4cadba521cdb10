"""What docs/does_not_fit.md says that the program refuses is refused, in the words of the page."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from steadfast import fit
from steadfast.data.order import Int64s
from steadfast.errors import SteadfastError
from tests.examples.migrate.two_optimizers import Both
from tests.programs import (
    batchnorm,
    clip_gathered,
    contrastive,
    lbfgs,
    nadam,
    part_of_model,
    returns_loss,
    sam,
    sparse,
    stream,
    synchronized,
)
from tests.programs.program import Program, optimized_by
from tests.support.command import ROOT

FSDP = "parallel.kind=fsdp"
Case = Callable[[Path], Any]


class Sampled:
    """A dataset that brings a sampler along."""

    sampler = (2, 0, 1)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return nadam.data()[index]


class Counting(torch.optim.SGD):
    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        super().step()


class Remembering:
    """An order that goes on from its last call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, seed: int, epoch: Int64s, place: Int64s, num_samples: int) -> Int64s:
        self.calls += 1
        return np.asarray((place + self.calls) % num_samples, np.int64)


def two(params: list[torch.nn.Parameter], lr: float) -> Any:
    return [torch.optim.SGD(params[:2], lr), torch.optim.Adam(params[2:], lr)]


def case(*words: str, program: Program = nadam.PROGRAM, **objects: Any) -> Case:
    """Return a function that trains a program below a folder."""
    return lambda storage: fit(program.config(storage, *words), **objects)


# By the beginning of the row's first cell.
CASES: dict[str, list[Case]] = {
    "`IterableDataset`": [case(program=stream.PROGRAM)],
    "a `DataLoader`": [case(dataset=DataLoader(nadam.data()))],
    "a dataset with a `sampler`": [case(dataset=Sampled())],
    "an order with a memory": [case(order=Remembering())],
    "a loss that returns a mean": [case(program=returns_loss.PROGRAM)],
    "a loss over pairs": [case(program=contrastive.PROGRAM)],
    "`all_gather`": [case(program=clip_gathered.PROGRAM)],
    "LBFGS, SAM": [case(program=lbfgs.PROGRAM), case(program=sam.PROGRAM)],
    "`sparse=True`": [case(program=sparse.PROGRAM)],
    "`SparseAdam`": [case(optimizer=torch.optim.SparseAdam)],
    "a list of optimizers": [case(optimizer=two)],
    "an optimizer that counts": [case(optimizer=Counting)],
    "Adafactor under fsdp": [case(FSDP, optimized_by("torch.optim:Adafactor"))],
    "Muon under fsdp": [case(FSDP, "optimizer={kind: muon}")],
    "`model.part(x)`": [case(FSDP, program=part_of_model.PROGRAM)],
    "`SyncBatchNorm`": [case(program=synchronized.PROGRAM)],
    "BatchNorm with `run.exact`": [case("run.exact=true", program=batchnorm.PROGRAM)],
    "context or expert": [case("parallel.kind=context"), case("parallel.kind=expert")],
    "a batch size that grows": [case("batch.global_size=[10, 20]")],
}


def messages() -> dict[str, str]:
    """Return the message of each row of the page's first table, by the row's first cell."""
    table = (ROOT / "docs/does_not_fit.md").read_text().partition("## Refused")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {row[0]: row[1].strip("`") for row in rows[1:]}


def test_each_row_of_the_page_has_a_program() -> None:
    rows = list(messages())
    assert len(rows) == len(CASES)
    for row, begins in zip(rows, CASES, strict=True):
        assert row.startswith(begins)


@pytest.mark.parametrize("begins", CASES)
def test_what_does_not_fit_is_refused_in_the_words_of_the_page(tmp_path: Path, begins: str) -> None:
    (message,) = (message for row, message in messages().items() if row.startswith(begins))
    words = ".*".join(map(re.escape, message.split("…")))
    for train in CASES[begins]:
        # An exact run sets variables for the libraries of the GPU.
        with mock.patch.dict(os.environ), pytest.raises(SteadfastError, match=words):
            train(tmp_path)


def test_two_optimizers_train_as_one_class(tmp_path: Path) -> None:
    config = nadam.PROGRAM.config(tmp_path)
    result = fit(config, optimizer=Both, order="sequential")
    dataset = nadam.data()
    torch.manual_seed(config.run.seed)
    model = nadam.Model().double()
    params = list(model.parameters())
    optimizers = [torch.optim.SGD(params[:2], 0.01, momentum=0.9), torch.optim.Adam(params[2:], 0.01)]
    for step in range(config.run.steps or 0):
        ids = [index % len(dataset) for index in range(step * 10, step * 10 + 10)]
        sums = nadam.Task().loss(model, dataset[ids])
        model.zero_grad()
        (sums.loss_sum / sums.count).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert result.model is not None
    torch.testing.assert_close(result.model.state_dict(), model.state_dict(), rtol=1e-9, atol=1e-12)
