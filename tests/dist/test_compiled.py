"""Compiled layers: the result is the one without, nothing is compiled again, and nobody waits for a newcomer."""

import json
import os
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steadfast.hooks.hook import HookContext
from tests.support.claims import check_run
from tests.support.drill import Drilled, drill
from tests.support.models import Embedded
from tests.support.patches import write_no_code
from tests.support.reference import reference
from tests.support.small import CONTEXT, small

KINDS = ["ddp", "fsdp"]
GRAPHS = 2  # one of all layers, and one of the loss


class Graphs:
    """A hook that writes down how many graphs its process has compiled so far, before the first step and after each."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def on_start(self, run: HookContext) -> None:
        self._write(run, "start")

    def on_step(self, run: HookContext) -> None:
        self._write(run, "step")

    def _write(self, run: HookContext, when: str) -> None:
        from torch._dynamo.utils import counters

        line = {"attempt": run.attempt, "when": when, "graphs": counters["stats"]["unique_graphs"]}
        with Path(self._folder, f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def compiling(tmp_path: Path, *words: str) -> list[str]:
    folder = tmp_path / "graphs"
    folder.mkdir()
    hook = f"{{target: 'tests.dist.test_compiled:Graphs', args: {{folder: {folder}}}}}"
    return ["compile=blocks", f"hooks=[{hook}]", *words]


def graphs_of(tmp_path: Path) -> dict[int, list[dict[str, Any]]]:
    """By process, what it has written down."""
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for file in (tmp_path / "graphs").iterdir():
        found[int(file.stem)] = [json.loads(line) for line in file.read_text().splitlines()]
    return found


def check_nothing_is_told(run: Drilled) -> None:
    told = {event["event"] for event in run.events}
    assert not told & {"recompiled", "graph_break", "not_compiled"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_with_dropout_and_resizes_the_result_is_that_without(tmp_path: Path, kind: str) -> None:
    """By the compiler that users have, which is slow where it has not compiled these layers before."""
    words = compiling(tmp_path, f"parallel.kind={kind}", "run.steps=20")
    run = drill(small(tmp_path, *words), worlds=[1, 2, 3], leave_after=[6, 6])
    check_run(run, reference(small(tmp_path, "run.steps=20")))
    check_nothing_is_told(run)
    probed = kind == "fsdp"
    assert [lines[-1]["graphs"] for lines in graphs_of(tmp_path).values()] == [GRAPHS + probed] * 3


@pytest.mark.parametrize("kind", [*KINDS, "ddp, reducer: torch"])
def test_more_worlds_compile_nothing_again(tmp_path: Path, kind: str) -> None:
    """With short microbatches and, under fsdp, pads in each step; and validation."""
    words = compiling(tmp_path, f"parallel={{kind: {kind}}}", "run.steps=18", "validation.every='2 steps'")
    worlds = [1, 2, 3, 1, 3, 2]
    run = drill(small(tmp_path, *words), worlds, leave_after=[1] * 5, patch=write_no_code)
    check_run(run, reference(small(tmp_path, "run.steps=18")))
    check_nothing_is_told(run)
    written = graphs_of(tmp_path)
    assert len({line["attempt"] for lines in written.values() for line in lines}) == 6
    assert [max(line["graphs"] for line in lines) for lines in written.values()] == [GRAPHS] * 3
    if kind == "ddp":  # a newcomer has compiled before it joins
        assert {line["graphs"] for lines in written.values() for line in lines} == {GRAPHS}


@pytest.mark.filterwarnings("ignore")
def test_what_fsdp_gathers_within_a_layer_breaks_it_into_parts_and_changes_nothing(tmp_path: Path) -> None:
    words = ["parallel.kind=fsdp", "parallel.wrap=[Attention]"]
    config = small(tmp_path, *compiling(tmp_path, *words))
    run = drill(config, worlds=[2, 1, 2], leave_after=[3, 3], patch=write_no_code)
    check_run(run, reference(small(tmp_path)))
    (place,) = run.told("graph_break", "place")
    assert "/steadfast/models/gpt.py:" in place


@pytest.mark.parametrize("kind", KINDS)
def test_in_16_bits(tmp_path: Path, kind: str) -> None:
    words = [f"parallel.kind={kind}", "precision.kind=bf16"]
    plain = drill(small(tmp_path / "plain", *words), worlds=[2])
    config = small(tmp_path / "compiled", *compiling(tmp_path, *words))
    run = drill(config, worlds=[2, 1], leave_after=[4], patch=write_no_code)
    check_nothing_is_told(run)
    assert [lines[-1]["graphs"] for lines in graphs_of(tmp_path).values()] == [GRAPHS] * 2
    losses = [line["loss"] for line in plain.history.lines]
    assert [line["loss"] for line in run.history.lines] == pytest.approx(losses, rel=0.02)


def test_running_statistics_are_those_without(tmp_path: Path) -> None:
    """Of layers that are compiled twice: the inputs of the first one lie in memory in another order."""
    words = ["model.target=tests.support.models:Layers"]
    run = drill(small(tmp_path, *compiling(tmp_path, *words)), worlds=[3, 2], leave_after=[4], patch=write_no_code)
    check_run(run, reference(small(tmp_path, *words)))
    assert ["stride mismatch" in reason for reason in run.told("recompiled", "reason")] == [True]
    assert [{line["graphs"] for line in lines} for lines in graphs_of(tmp_path).values()] == [{GRAPHS + 1}] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_may_go_on_without(tmp_path: Path, kind: str) -> None:
    plain = [f"parallel.kind={kind}"]
    drill(small(tmp_path, *compiling(tmp_path), *plain), worlds=[2], stop_after=6, patch=write_no_code)
    run = drill(small(tmp_path, *plain), worlds=[2])
    assert "checkpoint" in run.told("restore", "source")
    check_run(run, reference(small(tmp_path)))


def no_compiler() -> None:
    import torch._inductor.config

    torch._inductor.config.cpp.cxx = (None, "/no/such/compiler")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()  # or code that another test has compiled would do


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_compiler_the_run_goes_on_and_says_so_once(tmp_path: Path, kind: str) -> None:
    run = drill(small(tmp_path, "compile=blocks", f"parallel.kind={kind}"), worlds=[2], patch=no_compiler)
    check_run(run, reference(small(tmp_path)))
    (event,) = [event for event in run.events if event["event"] == "not_compiled"]
    assert event["ranks"] == [0, 1]
    assert "C++ compiler" in event["reason"]


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = self.linear(inputs)
        torch._dynamo.graph_break()
        return inputs.tanh()


class BrokenLayers(Embedded):
    """Two like layers, each with something in it that no compiler takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Breaking(), Breaking())

    def between(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        broken: Tensor = self.layers(hidden)
        return broken


def test_a_graph_break_is_told_once_and_costs_nothing_else(tmp_path: Path) -> None:
    words = ["model.target=tests.dist.test_compiled:BrokenLayers"]
    run = drill(small(tmp_path, "compile=blocks", *words), worlds=[2], patch=write_no_code)
    check_run(run, reference(small(tmp_path, *words)))
    (event,) = [event for event in run.events if event["event"] == "graph_break"]
    assert event["place"].startswith(__file__)


class Ragged(Embedded):
    """A model that looks at all but the last token in every second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
        self._num_forwards = 0

    def between(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        self._num_forwards += 1
        num_read = CONTEXT - self._num_forwards % 2
        return torch.cat([self.layers(hidden[:, :num_read]), hidden[:, num_read:]], dim=1)


def test_a_recompilation_is_told_with_its_reason(tmp_path: Path) -> None:
    words = ["model.target=tests.dist.test_compiled:Ragged", "compile=blocks"]
    run = drill(small(tmp_path, *words), worlds=[1], patch=write_no_code)
    assert any("size mismatch at index 1. expected 5, actual 6" in why for why in run.told("recompiled", "reason"))
