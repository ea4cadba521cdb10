"""Workers hold the memory that `plan` names, and give a model's memory back."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import steadfast
from tests.benchmarks.memory import SIZES, compare, config_of
from tests.examples.script import line, squared_error

WIDTH = 256
MODEL_BYTES = 4 * WIDTH * WIDTH
TIMES = [4, pytest.param(20, marks=pytest.mark.slow)]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_memory_of_a_worker_is_known_before_the_run(strategy: str) -> None:
    found = compare(config_of(next(iter(SIZES)), strategy, num_workers=2))
    assert found.ratio == pytest.approx(1.0, abs=0.15)


class Counted:
    """A hook that counts, at the begin of each attempt, the models that are alive and the bytes of all parameters."""

    def __init__(self) -> None:
        self.models: list[weakref.ref[nn.Module]] = []
        self.num_alive: list[int] = []
        self.num_bytes: list[int] = []

    def setup(self, run: Any) -> None:
        self.models.append(weakref.ref(run.model))

    def on_start(self, run: Any) -> None:
        self.num_bytes.append(tensor_bytes(nn.Parameter))
        self.num_alive.append(len({id(model) for each in self.models if (model := each())}))


def tensor_bytes(kind: type[torch.Tensor] = torch.Tensor) -> int:
    """Return the bytes behind all tensors of a kind that are alive in this process, and behind their gradients."""
    gc.collect()
    sizes: dict[int, int] = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and isinstance(each, kind):  # some objects pretend to be one
            held: torch.Tensor = each
            for tensor in (held, held.grad if held.is_leaf else None):
                if tensor is not None:
                    storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
                    sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def build_wide() -> nn.Module:
    return nn.Sequential(nn.Linear(4, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 1))


def train(storage: Path, name: str, parallel: dict[str, str], bad_steps: int, hook: Counted) -> None:
    config = steadfast.Config.model_validate(
        {
            "run": {"name": name, "storage": str(storage), "steps": bad_steps + 1, "report": False},
            "batch": {"global_size": 4, "microbatch_size": 4},
            "checkpoint": {"every": "1 steps", "node_memory": False},  # a bad step is found within a save
            "parallel": parallel,
            "faults": {"inject": [{"kind": "nan_at", "step": step + 1, "times": None} for step in range(bad_steps)]},
            "recovery": {"max_skipped_steps": bad_steps},
            "trackers": [],
        }
    )
    steadfast.fit(config, model=build_wide, dataset=line(120), task=squared_error, hooks=[hook])


def check_nothing_is_left(hook: Counted, num_bytes_before: int) -> None:
    """Claim: no model outlives its attempt, and the memory of all attempts is the same."""
    assert tensor_bytes() - num_bytes_before <= 0.02 * MODEL_BYTES
    assert not any(each() for each in hook.models)
    assert max(hook.num_alive) == 1
    print("bytes of parameters at the begin of each attempt:", *hook.num_bytes)
    assert max(hook.num_bytes) - min(hook.num_bytes) <= 0.02 * MODEL_BYTES


PARALLEL = [{"kind": "ddp"}, {"kind": "ddp", "reducer": "torch"}, {"kind": "fsdp"}]


@pytest.mark.parametrize("parallel", PARALLEL, ids=["ddp", "torch", "fsdp"])
@pytest.mark.parametrize("times", TIMES)
def test_a_rollback_gives_back_all_of_the_former_model(tmp_path: Path, parallel: dict[str, str], times: int) -> None:
    hook = Counted()
    before = tensor_bytes()
    train(tmp_path, "x", parallel, times, hook)
    assert len(hook.num_bytes) == times + 1
    check_nothing_is_left(hook, before)


@pytest.mark.parametrize("parallel", PARALLEL, ids=["ddp", "torch", "fsdp"])
@pytest.mark.parametrize("times", TIMES)
def test_fit_gives_back_all_of_its_model(tmp_path: Path, parallel: dict[str, str], times: int) -> None:
    hook = Counted()
    before = tensor_bytes()
    for number in range(times):
        train(tmp_path, f"run-{number}", parallel, 0, hook)
    check_nothing_is_left(hook, before)
