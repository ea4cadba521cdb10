"""The programs of docs/migrate: another trainer's and that for Steadfast train to the same loss."""

import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import tests.examples.operators  # noqa: F401 - before transformers
from steadfast import Config, fit
from tests.support.command import ROOT, STANDALONE
from tests.support.programs import run_program

PROGRAMS = ROOT / "tests/examples/migrate"
LIGHTNING = pytest.mark.filterwarnings("ignore")  # Lightning's own, and those of its use of torch


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter the folder in which a program writes its run."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(name: str, **environment: str) -> dict[str, Any]:
    """Run a program in this process and return its variables."""
    with mock.patch.dict(os.environ, environment):
        return runpy.run_path(str(PROGRAMS / f"{name}.py"), run_name="__main__")


def printed(output: str) -> list[float]:
    """Return the losses that a program prints at its end."""
    # Two ranks may print on one line. Losses of the console have fewer digits.
    return [float(found) for found in re.findall(r"loss (\d+\.\d{6})", output)]


def free_port() -> str:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return str(listening.getsockname()[1])


def test_a_ddp_script_and_fit_under_torchrun_train_alike(capsys: pytest.CaptureFixture[str]) -> None:
    run("ddp_before", RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    (expected,) = printed(capsys.readouterr().out)
    said = run_program(*STANDALONE, PROGRAMS / "ddp_after.py", cwd=Path.cwd())
    assert printed(said) == pytest.approx([expected, expected], abs=1e-4)


@LIGHTNING
def test_fit_ends_with_the_figures_of_lightning(capsys: pytest.CaptureFixture[str]) -> None:
    before = run("lightning_before")["trainer"].callback_metrics
    capsys.readouterr()
    metrics = run("lightning_after")["result"].summary["metrics"]
    assert metrics == pytest.approx({name: float(before[name]) for name in ("loss", "accuracy")}, abs=1e-4)
    assert "\n72 0.82375" in capsys.readouterr().out  # from the callback


KILLED = """
import runpy
import tests.examples.operators
import steadfast.lightning
from steadfast.config import with_values

train = steadfast.lightning.fit_module
kill = {"inject": [{"kind": "kill_at", "step": 50, "rank": 0}]}
steadfast.lightning.fit_module = lambda config, *args, **named: train(
    with_values(config, "faults", kill), *args, **named
)
"""


@LIGHTNING
def test_a_module_of_lightning_is_killed_and_ends_with_the_loss_of_its_trainer(folder: Path) -> None:
    program = str(PROGRAMS / "lightning_module.py")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'app'}:{ROOT}"}
    losses: list[dict[str, float]] = []
    for first in (KILLED, "import runpy, tests.examples.operators"):
        words = [sys.executable, "-c", f"{first}\nrunpy.run_path({program!r}, run_name='__main__')"]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
        found = re.search(r"loss (\S+), largest (\S+)", done.stdout)
        if found:
            losses.append({"val_loss": float(found[1]), "largest": float(found[2])})
    assert done.returncode == 0, done.stderr
    assert "step 40 restored from checkpoint" in done.stdout, done.stdout
    assert len(losses) == 1, "the first command is killed"
    assert trainer_of(runpy.run_path(program)) == pytest.approx(losses[0], abs=1e-4)


def trainer_of(program: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of Lightning's own trainer for the same module and data."""
    import lightning

    torch.manual_seed(0)
    module = program["Autoencoder"]()
    trainer = lightning.Trainer(
        max_epochs=4, accumulate_grad_batches=2, gradient_clip_val=1.0, logger=False, enable_checkpointing=False
    )
    data = [torch.utils.data.DataLoader(program[name], batch_size=32) for name in ("train_set", "test_set")]
    trainer.fit(module, *data)
    return {name: float(trainer.callback_metrics[name]) for name in ("val_loss", "largest")}


def test_a_loop_with_accelerate_and_fit_train_alike(capsys: pytest.CaptureFixture[str]) -> None:
    run("accelerate_before")
    run("accelerate_after")
    before, after = printed(capsys.readouterr().out)
    assert after == pytest.approx(before, abs=1e-4)


def test_the_trainer_of_hugging_face_and_fit_train_alike(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved: list[Any] = []
    for name in ("hugging_face_before", "hugging_face_after"):
        model = run(name)["model"]
        saved.append(type(model).from_pretrained(folder / "gpt2/final").state_dict())
    before, after = printed(capsys.readouterr().out)
    assert after == pytest.approx(before, abs=1e-4)
    torch.testing.assert_close(saved[1], saved[0], rtol=0, atol=1e-3)


def test_a_loop_of_ray_train_and_the_configuration_train_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    train = runpy.run_path(str(PROGRAMS / "ray_before.py"))["train"]
    before = TorchTrainer(train, scaling_config=ScalingConfig(num_workers=0)).fit().metrics  # in this process
    monkeypatch.syspath_prepend(PROGRAMS)
    after = fit(PROGRAMS / "ray_after.yaml").summary["metrics"]
    assert after["loss"] == pytest.approx(before["loss"], abs=1e-4)


def test_the_configuration_of_the_page_of_defaults_is_a_plain_loop() -> None:
    block = (ROOT / "docs/defaults.md").read_text().partition("```yaml\n")[2].partition("```")[0]
    pixels, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(pixels / 16).float()[:1536], torch.tensor(labels)[:1536])

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    config = Config.model_validate(yaml.safe_load(block))
    trained = fit(config, model=build(), dataset=dataset).model
    plain = build()
    optimizer = torch.optim.AdamW(plain.parameters())
    for _ in range(3):
        for inputs, targets in torch.utils.data.DataLoader(dataset, batch_size=64):
            optimizer.zero_grad()
            cross_entropy(plain(inputs), targets).backward()
            optimizer.step()
    assert trained is not None
    torch.testing.assert_close(trained.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)
