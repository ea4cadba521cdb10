"""Each program of tests/programs equals its plain loop, through resizes and a death, or is refused in one line.

What docs/does_not_fit.md says that the program refuses is refused in the words of the page.
"""

import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from steadfast import fit
from steadfast.config import Config
from steadfast.data.order import Int64s
from steadfast.errors import SteadfastError
from steadfast.run.directory import RunDirectory
from tests.examples.migrate.two_optimizers import Both
from tests.programs import (
    batchnorm,
    clip_gathered,
    contrastive,
    lbfgs,
    methods,
    nadam,
    part_of_model,
    returns_loss,
    sam,
    sparse,
    stream,
    synchronized,
)
from tests.programs.catalog import PROGRAMS
from tests.programs.program import BOTH, STEPS, Program, Trained, optimized_by
from tests.support.checks import check_audit
from tests.support.command import ROOT
from tests.support.deaths import Plot, take_part
from tests.support.drill import Drilled, begin_run, drill, what_is_left
from tests.support.gang import Gang, MemberFailed
from tests.support.history import read_ledger
from tests.support.like_nccl import Death
from tests.support.models import Extra, Fused

# Steps 1 and 2 on one worker, 3 and 4 on two, then three; one of these is killed in step 8, and two go on.
KILLED_IN = 8
PLOT = Plot([[0], [0, 1], [0, 1, 2], [0, 2]], {3: (1, Death(0, "while it runs"))}, leave_after={1: 1, 2: 1})


def params(accepted: bool) -> list[Any]:
    """Return each program with each kind of parallelism under which it is accepted, or is not."""
    each = [(program, kind) for program in PROGRAMS for kind in BOTH if (kind not in program.refused) == accepted]
    return [pytest.param(program, kind, id=f"{program.name}-{kind}") for program, kind in each]


@pytest.mark.parametrize(("program", "kind"), params(accepted=True))
def test_a_program_equals_its_plain_loop_through_resizes_and_a_death(
    tmp_path: Path, program: Program, kind: str
) -> None:
    death = f"faults.inject=[{{kind: kill_at, step: {KILLED_IN}, rank: 1}}]"
    run = train_through(program.config(tmp_path, f"parallel.kind={kind}", death))
    assert program.plain is not None
    expected = plainly(program.plain)
    # Steps that the death made the survivors do again have two lines, and both are compared.
    lines = run.history.lines
    assert {(line["attempt"], line["world_size"]) for line in lines} == {(1, 1), (2, 2), (3, 3), (4, 2)}
    assert set(run.history.committed) == set(range(1, STEPS + 1))
    for line in lines:
        # The numbers of a step may have been on their way to the dead worker; the weights show what the step was.
        if line.get("confirmed", True):
            assert line["loss"] == pytest.approx(expected.losses[line["step"] - 1], rel=1e-6, abs=1e-9), line
    # Numbers are read one step later, so a death may lose those of the step before and of the step before that.
    assert len({line["step"] for line in lines if line["loss"] is not None}) >= STEPS - 2
    assert run.weights.keys() == expected.weights.keys()
    for name, tensor in expected.weights.items():
        assert torch.allclose(run.weights[name].double(), tensor.double(), rtol=1e-6, atol=1e-9), name


@pytest.mark.parametrize(("program", "kind"), params(accepted=False))
def test_a_program_is_refused_in_one_line_before_the_first_step(tmp_path: Path, program: Program, kind: str) -> None:
    config = program.config(tmp_path, f"parallel.kind={kind}")
    with pytest.raises(MemberFailed) as failed:
        drill(config, worlds=[2])
    message = str(failed.value).partition("process 1:")[0].strip().splitlines()[-1]
    assert re.fullmatch(r"steadfast\.errors\.\w+: .*", message), failed.value
    assert program.refused[kind] in message
    assert not read_ledger(RunDirectory.of(config).store).lines


@pytest.mark.parametrize("program", [methods.PROGRAM, part_of_model.PROGRAM], ids=lambda program: program.name)
def test_the_reducer_of_torch_refuses_a_loss_that_does_not_call_the_model(tmp_path: Path, program: Program) -> None:
    """Torch's reducer would leave each worker with the gradients of its own microbatches."""
    config = program.config(tmp_path, "parallel={kind: ddp, reducer: torch}")
    with pytest.raises(MemberFailed, match=r"TrainingError: parallel\.reducer=torch: the task's loss calls"):
        drill(config, worlds=[2])
    assert not read_ledger(RunDirectory.of(config).store).lines


@cache
def plainly(plain: Callable[[], Trained]) -> Trained:
    return plain()


def train_through(config: Config) -> Drilled:
    """Train through the worlds of the plot."""
    directory = begin_run(config)
    with Gang(3) as gang:
        gang.run(take_part, config, PLOT, mortal=[1])
    check_audit(directory, config)
    return what_is_left(config, directory, [])


FSDP = "parallel.kind=fsdp"
Case = Callable[[Path], Any]


class Sampled:
    """A dataset that brings a sampler along."""

    sampler = (2, 0, 1)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return nadam.data()[index]


class Growing(nn.Linear):
    """Keeps the mean of each input."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.mean().view(1)])
        return super().forward(x)


class Clipped(nn.Linear):
    """Keeps its weights small, as the critic of a Wasserstein GAN."""

    def __init__(self) -> None:
        super().__init__(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.01, 0.01)
        return super().forward(x)


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
    "a complex, quantised": [case(model=nn.ParameterList([torch.zeros(1, dtype=torch.cfloat)]))],
    "`get_extra_state`": [case(model=Extra({"calls": 1}))],
    "a persistent buffer": [case(model=Growing())],
    "a `state_dict()` that": [case(model=Fused(split=Tensor.bfloat16))],
    "a `state_dict()` made": [case(FSDP, model=Fused()), case(FSDP, model=Extra(torch.ones(1)))],
    "a forward that writes": [case(FSDP, model=Clipped())],
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
