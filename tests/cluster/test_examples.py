"""Models that were written for other trainers: a worker is killed, and they end as they do in their own loop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import tests.examples.operators  # noqa: F401 - before torchvision
from tests.cluster.own_loops import mingpt_by_hand, resnet_by_hand
from tests.examples import mingpt
from tests.support.checks import check_ledger, summary_of, weights_of
from tests.support.command import ROOT, Command, Commands

from torchvision import models  # isort: skip

pytestmark = pytest.mark.ray


def lose_a_worker(command: Command, num_steps: int, by_hand: Callable[[int], float], *overrides: str) -> None:
    """Claim: a run of which a worker is killed ends with the loss of the loop `by_hand` after as many steps."""
    running = command.start(f"run.steps={num_steps}", "scaling.num_workers=[1,2]", *overrides, small=False)
    running.wait_for_event("attempt_started", attempt=1, world_size=2, timeout_s=150)
    running.wait_for_step(num_steps // 4)
    os.kill(running.worker_pids("SlotWorker")[0], signal.SIGKILL)
    running.wait_for_event("attempt_started", attempt=2, world_size=1, source="rank 0")
    expected = by_hand(num_steps)
    finished = running.wait()
    assert finished.code == 0, finished.output
    assert check_ledger(command.directory, num_steps).num_lost == 0
    # Closer than 1 %, which a rate that falls a step too early would pass.
    assert summary_of(command.directory)["metrics"]["loss"] == pytest.approx(expected, rel=0.001)


def check_export(
    command: Command, plain: nn.Module, same: nn.Module, batch: Tensor, logits: Callable[..., Tensor]
) -> None:
    """Claim: what `export` writes is what a model that knows nothing of this program loads, and computes the same."""
    out = command.storage / "model.safetensors"
    words = [sys.executable, "main.py", "export", str(command.directory), "--out", str(out)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True, timeout=60)
    plain.load_state_dict(load_file(out), strict=True)
    same.load_state_dict(weights_of(command.directory))
    with torch.no_grad():
        assert torch.equal(logits(plain.eval()(batch)), logits(same.eval()(batch)))


@pytest.mark.timeout(240)
def test_a_resnet_with_its_own_validation_set_and_metrics(on_head: Commands) -> None:
    command = on_head("resnet", config="resnet.yaml")
    lose_a_worker(command, 32, resnet_by_hand, "schedule.every_steps=12")
    metrics = summary_of(command.directory)["metrics"]
    assert 0.1 < metrics["top1"] < metrics["top5"] <= 1
    images = torch.rand(3, 3, 32, 32)
    check_export(command, models.resnet18(num_classes=10), models.resnet18(num_classes=10), images, lambda out: out)


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_a_mingpt_with_its_own_loss(on_head: Commands) -> None:
    command = on_head("mingpt", config="mingpt.yaml")
    lose_a_worker(command, 80, mingpt_by_hand)
    tokens = torch.randint(100, (2, 64))
    check_export(command, mingpt.GPT(128), mingpt.GPT(128), tokens, lambda out: out[0])
