"""Ranks on unequal GPUs compute in one format, and are measured by the sum of their peaks."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from steadfast.loop import worker_state
from steadfast.loop.worker_state import WorkerState
from steadfast.models import build_model
from steadfast.parallel.precision import Precision
from steadfast.world.device import DETERMINISTIC, Gpu
from steadfast.world.groups import WorldRank
from steadfast.world.runtime import WorkerProcess, form_world
from tests.support.drill import drill
from tests.support.gang import Gang, Member
from tests.support.reference import CPU
from tests.support.small import small

CUDA = torch.device("cuda", 0)
L4, T4 = Gpu("NVIDIA L4", True), Gpu("Tesla T4", False)


def join_with(member: Member, storage: str, generation: int, gpus: list[Gpu]) -> torch.dtype:
    """Join a world in which each rank knows just its own GPU. Return the format that it computes in then."""
    own = gpus[member.number]
    worker = WorkerState(small(storage, "precision.kind=auto"), CPU)
    worker.precision = Precision(CUDA)
    world = form_world(member.store, WorldRank(member.number, len(gpus), generation), WorkerProcess(CPU))
    with (
        patch.object(torch.cuda, "get_device_name", lambda device: own.name),
        # By itself torch calls it support when bf16 is emulated.
        patch.object(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or own[1]),
    ):
        worker.join(world)
    assert worker.gpus == tuple(gpus)
    world.groups.destroy()
    return worker.precision.compute_dtype


def test_all_ranks_compute_in_one_format_also_where_some_gpus_have_no_bf16(tmp_path: Path) -> None:
    with Gang(2) as gang:
        assert gang.run(join_with, str(tmp_path), 1, [L4, L4]) == [torch.bfloat16] * 2
        assert gang.run(join_with, str(tmp_path), 2, [L4, T4]) == [torch.float32] * 2
        assert gang.run(join_with, str(tmp_path), 3, [T4, T4]) == [torch.float32] * 2


WARMUP = "schedule.warmup_steps 3 -> 2: the run has 2 steps"


def unequal_gpus() -> None:
    vars(worker_state)["gather_gpus"] = lambda *_: (L4, T4)


def test_a_run_on_unequal_gpus_tells_of_its_format_and_is_measured_by_all_of_them(tmp_path: Path) -> None:
    words = ("run.steps=2", "precision.kind=auto", "logging.every_steps=1")
    config = small(tmp_path, *words)
    drilled = drill(config, worlds=[2], patch=unequal_gpus)
    assert drilled.told("notice", "text") == [
        "precision.kind=auto is fp32, not bf16: the Tesla T4 of rank 1 has no bf16",
        WARMUP,
    ]
    assert drilled.told("attempt_started", "gpus") == [["NVIDIA L4", "Tesla T4"]]
    (nodes,) = drilled.told("attempt_started", "nodes")
    assert list(nodes.values()) == [[0, 1]]
    (step_s,), (first_step_s,) = (drilled.told("attempt_started", field) for field in ("step_s", "first_step_s"))
    assert 0 < step_s <= first_step_s + 0.001  # both are rounded
    line = json.loads((tmp_path / "small" / "metrics.jsonl").read_text().splitlines()[-1])
    flops = build_model(config.model).flops_per_sample()  # type: ignore[operator]
    assert line["mfu"] == pytest.approx(line["samples_per_s"] * flops / (30.3e12 + 8.1e12))


def test_a_deterministic_run_tells_what_the_environment_alters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in DETERMINISTIC.items():
        monkeypatch.setenv(name, "Tree" if name == "NCCL_ALGO" else value)
    drilled = drill(small(tmp_path, "run.steps=2", "run.deterministic=true"), worlds=[2])
    assert drilled.told("notice", "text") == [
        "run.deterministic keeps NCCL_ALGO=Tree of the environment; results may differ between runs",
        WARMUP,
    ]
