"""Each program of tests/programs equals its plain loop, through resizes and a death, or is refused in one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from steadfast.config import Config
from steadfast.run.directory import RunDirectory
from steadfast.worker import work
from tests.programs import methods, part_of_model
from tests.programs.catalog import PROGRAMS
from tests.programs.program import BOTH, STEPS, Program, Trained
from tests.support.checks import check_audit
from tests.support.deaths import MortalRuntime, Plot
from tests.support.drill import Drilled, begin_run, drill, what_is_left
from tests.support.gang import Gang, Member, MemberFailed
from tests.support.history import read_ledger
from tests.support.like_nccl import Death

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
        gang.run(_take_part, config, mortal=[1])
    check_audit(directory, config)
    return what_is_left(config, directory, [])


def _take_part(member: Member, config: Config) -> None:
    directory = RunDirectory.of(config)
    runtime = MortalRuntime(member, PLOT, directory)
    try:
        work(config, runtime, directory)
    finally:
        runtime.close()
