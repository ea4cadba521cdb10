"""fp16: a step whose gradients overflow updates nothing, on all ranks alike; the run goes on with a smaller scale."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from steadfast.checkpoint.catalog import Catalog
from steadfast.checkpoint.initial import build_initial
from steadfast.checkpoint.weights import read_whole
from steadfast.config import Config
from steadfast.run.directory import RunDirectory
from tests.support.drill import Drilled, drill
from tests.support.small import small

# So large that it overflows at once, and, divided by 1024 three times, again a few updates later.
SCALE = "precision={kind: fp16, loss_scale: {initial: 1.0e+15, factor: 1024, window: 4}}"
STEPS = 24
TENSOR = "fsdp, tensor_size: 2"
PARTS_IN_STAGES = "pipeline, tensor_size: 2"


def config_of(storage: Path, kind: str, *overrides: str) -> Config:
    words = ["model.attention_dropout=0"] if kind in (TENSOR, PARTS_IN_STAGES) else []
    return small(storage, SCALE, f"parallel={{kind: {kind}}}", *words, f"run.steps={STEPS}", *overrides)


def overflows(run: Drilled) -> list[int]:
    return [step for step, line in sorted(run.history.committed.items()) if line.get("overflow")]


def scale_of(config: Config) -> float:
    """The scale of the last checkpoint."""
    catalog = Catalog(RunDirectory.of(config).store)
    newest = catalog.newest()
    assert newest is not None
    return float(read_whole(catalog, newest, "precision")["scale"])


@pytest.mark.parametrize(
    "kind", ["ddp", "fsdp", "pipeline", TENSOR, pytest.param(PARTS_IN_STAGES, marks=pytest.mark.slow)]
)
def test_what_overflows_updates_nothing(tmp_path: Path, kind: str) -> None:
    config = config_of(tmp_path, kind, "run.steps=2")
    run = drill(config, worlds=[4 if kind == PARTS_IN_STAGES else 2])
    assert overflows(run) == [1, 2]
    assert run.summary["lost_steps"] == 0
    assert scale_of(config) == pytest.approx(1e15 / 1024**2)
    initial = build_initial(config)[0].state_dict()
    assert all(torch.equal(run.weights[name], initial[name]) for name in initial)
    assert not any(tensor.any() for tensor in run.optimizer.values())


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "pipeline", pytest.param(TENSOR, marks=pytest.mark.slow)])
def test_the_scale_goes_on_over_resizes_and_a_resume(tmp_path: Path, kind: str) -> None:
    smallest, largest = (2, 4) if kind in ("pipeline", TENSOR) else (1, 3)
    undisturbed = drill(config_of(tmp_path / "undisturbed", kind), worlds=[smallest])
    expected = overflows(undisturbed)
    assert expected[:4] == [1, 2, 3, 8], "after four updates it grows, and overflows again"
    config = config_of(tmp_path, kind)
    drill(config, worlds=[largest, 2, largest], leave_after=[5, 5], stop_after=4)
    resumed = drill(config, worlds=[2])
    assert overflows(resumed) == expected
    assert scale_of(config) == scale_of(config_of(tmp_path / "undisturbed", kind))
    losses = [line["loss"] for _, line in sorted(resumed.history.committed.items())]
    assert losses == pytest.approx([line["loss"] for line in undisturbed.history.lines], rel=0.02)


def test_a_run_in_fp32_goes_on_in_fp16(tmp_path: Path) -> None:
    drill(small(tmp_path, "precision.kind=fp32", "run.steps=3"), worlds=[2])
    run = drill(config_of(tmp_path, "ddp"), worlds=[2])
    assert overflows(run)[:2] == [4, 5]
