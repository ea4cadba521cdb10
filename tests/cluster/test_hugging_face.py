"""The examples of Hugging Face's libraries: a worker is killed, and the result is what their own Trainer comes to."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples import gpt2
from tests.support.checks import check_finished, check_ledger, summary_of
from tests.support.command import Command, Commands
from tests.support.programs import run_program

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

STEPS = 60
WORDS = ["scaling.num_workers=[1,2]", f"run.steps={STEPS}", "checkpoint.every=10 steps", "trackers=[]"]


def train_and_kill(run: Command, *words: str) -> list[dict[str, Any]]:
    """The events of a run that loses a worker in a third of its steps."""
    running = run.start(*WORDS, *words, small=False)
    running.wait_for_event("attempt_started", world_size=2, timeout_s=150)  # one that still starts is not missed
    running.wait_for_step(STEPS // 3)
    os.kill(running.worker_pids()[0], signal.SIGKILL)
    running.wait_for_event("failure", kind="worker")
    check_finished(running, 180)
    check_ledger(run.directory, STEPS)
    return running.events


def check_result(run: Command) -> None:
    """Claim: the loss is within 1 % of that of transformers' Trainer, and the export computes what the run's model did.

    The Trainer warms up one step later, and draws other dropout.
    """
    exported = run.directory / "exported"
    run_program("main.py", "export", run.directory, "--format", "hf", "--out", exported, "--trust-code")
    said = run_program("-m", "tests.cluster.trainer", run.directory, exported, timeout_s=240)
    found = json.loads(said.splitlines()[-1])
    assert found["difference"] <= 1e-6
    assert summary_of(run.directory)["metrics"]["loss"] == pytest.approx(found["trainer_loss"], rel=0.01)


def watched_gpt2(pretrained: str, told: str) -> Any:
    """Return the example's GPT-2 with a frozen part in evaluation mode, and a spy on its forwards."""
    watched = gpt2.model(pretrained)
    assert not watched.training  # as from_pretrained leaves it
    assert watched.transformer.drop.p > 0
    watched.train()
    watched.transformer.h[0].eval().requires_grad_(False)

    def tell(*_: object) -> None:
        modes = {"dropout": watched.transformer.drop.training, "frozen": watched.transformer.h[0].training}
        with open(told, "a") as file:
            file.write(json.dumps({"gradients": torch.is_grad_enabled(), **modes}) + "\n")

    watched.register_forward_pre_hook(tell)
    return watched


@pytest.mark.slow
def test_gpt2_from_pretrained_trains_and_its_frozen_part_does_not(on_head: Commands, tmp_path: Path) -> None:
    run_program("-m", "tests.examples.gpt2", tmp_path / "pretrained")
    run = on_head("gpt2", config="gpt2_finetune.yaml")
    arguments = f"model.args={{pretrained: {tmp_path}/pretrained, told: {tmp_path}/told}}"
    train_and_kill(run, f"model.target={__name__}:watched_gpt2", arguments, "validation.every=20 steps")
    lines = [line for line in (tmp_path / "told").read_text().splitlines() if line.endswith("}")]
    assert [json.loads(line) for line in sorted(set(lines))] == [
        {"gradients": False, "dropout": False, "frozen": False},
        {"gradients": True, "dropout": False, "frozen": False},  # the check of the task, before the first step
        {"gradients": True, "dropout": True, "frozen": False},
    ]
    check_result(run)


def test_llama_with_lora_is_sharded_and_its_checkpoints_hold_what_trains(on_head: Commands) -> None:
    run = on_head("lora", config="lora.yaml")
    (sharded,) = [event for event in train_and_kill(run) if event["event"] == "model_sharded"]
    assert sharded["layers"] == {"LlamaDecoderLayer": 3}
    manifest = json.loads(next(run.directory.glob("checkpoints/*/manifest.json")).read_text())
    assert manifest["base"]
    check_result(run)
