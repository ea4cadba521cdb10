"""The examples of Hugging Face's libraries: a worker is killed, and the result is what their own Trainer comes to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.checks import check_ledger, summary_of
from tests.support.command import ROOT, Command, Commands

pytestmark = pytest.mark.ray

STEPS = 60
WORDS = ["scaling.num_workers=[1,2]", f"run.steps={STEPS}", "checkpoint.every=10 steps", "trackers=[]"]


def python(*words: object) -> str:
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=240).stdout


def train_and_kill(run: Command, *words: str) -> list[dict[str, Any]]:
    """The events of a run that loses a worker in a third of its steps."""
    running = run.start(*WORDS, *words, small=False)
    running.wait_for_event("attempt_started", world_size=2, timeout_s=150)  # one that still starts is not missed
    running.wait_for_step(STEPS // 3)
    os.kill(running.worker_pids("SlotWorker")[0], signal.SIGKILL)
    running.wait_for_event("failure", kind="worker")
    finished = running.wait(180)
    assert finished.code == 0, finished.output
    check_ledger(run.directory, STEPS)
    return running.events


def check_result(run: Command) -> None:
    """Claim: the loss is within 1 % of that of transformers' Trainer, and the export computes what the run's model did.

    The Trainer warms up one step later, and draws other dropout.
    """
    exported = run.directory / "exported"
    python("main.py", "export", run.directory, "--format", "hf", "--out", exported, "--trust-code")
    found = json.loads(python("-m", "tests.cluster.trainer", run.directory, exported).splitlines()[-1])
    assert found["difference"] <= 1e-6
    assert summary_of(run.directory)["metrics"]["loss"] == pytest.approx(found["trainer_loss"], rel=0.01)


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_gpt2_from_pretrained_trains_and_its_frozen_part_does_not(on_head: Commands, tmp_path: Path) -> None:
    python("-m", "tests.examples.gpt2", tmp_path / "pretrained")
    run = on_head("gpt2", config="gpt2_finetune.yaml")
    arguments = f"model.args={{pretrained: {tmp_path}/pretrained, told: {tmp_path}/told}}"
    train_and_kill(run, "model.target=tests.cluster.watched:model", arguments, "validation.every=20 steps")
    lines = [line for line in (tmp_path / "told").read_text().splitlines() if line.endswith("}")]
    assert [json.loads(line) for line in sorted(set(lines))] == [
        {"gradients": False, "dropout": False, "frozen": False},
        {"gradients": True, "dropout": False, "frozen": False},  # the check of the task, before the first step
        {"gradients": True, "dropout": True, "frozen": False},
    ]
    check_result(run)


@pytest.mark.timeout(600)
def test_llama_with_lora_is_sharded_and_its_checkpoints_hold_what_trains(on_head: Commands) -> None:
    run = on_head("lora", config="lora.yaml")
    (sharded,) = [event for event in train_and_kill(run) if event["event"] == "model_sharded"]
    assert sharded["layers"] == {"LlamaDecoderLayer": 3}
    manifest = json.loads(next(run.directory.glob("checkpoints/*/manifest.json")).read_text())
    assert manifest["base"]
    check_result(run)
