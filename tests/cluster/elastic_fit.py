"""A program of a user's own that has started Ray, and trains by elastic workers: elastic_fit.py STORAGE.

One line of its output is a JSON object: what each call has returned or raised.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from steadfast import Config, Result, Sums, fit
from steadfast.errors import UsageError

STEPS = 24


def config_of(storage: str, name: str, **sections: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": name, "storage": storage, "steps": STEPS, "report": False},
            "batch": {"global_size": 12, "microbatch_size": 2},
            "optimizer": {"lr": 0.02},
            "precision": {"kind": "fp64"},
            "checkpoint": {"every": "8 steps"},
            "trackers": [],
            **sections,
        }
    )


def objects() -> dict[str, Any]:
    """Return arguments of `fit` that can be imported nowhere: classes and functions of this function."""

    class Points:
        def __init__(self) -> None:
            generator = torch.Generator().manual_seed(0)
            # More bytes than are sent with a call, so they go through Ray's object store.
            self.inputs = torch.randn(4000, 4, generator=generator)

        def __len__(self) -> int:
            return len(self.inputs)

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return self.inputs[index], self.inputs[index].sum().reshape(1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.layers(inputs)
            return outputs

    def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        inputs, targets = batch
        return Sums(F.mse_loss(model(inputs), targets, reduction="sum"), targets.numel())

    torch.manual_seed(3)
    return {"model": Net(), "dataset": Points(), "task": squared_error}


class KillsOnce:
    """A hook that kills its worker once in a run, after a checkpoint and between two of them."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def on_step(self, run: Any) -> None:
        if run.step != 12:
            return
        try:
            self._marker.touch(exist_ok=False)  # one of the workers succeeds
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


class Interrupts:
    """A hook that sends the program a Ctrl-C, as a user would in a notebook."""

    def __init__(self, at_step: int, pause_s: float) -> None:
        self._pid = os.getpid()
        self._at_step = at_step
        self._pause_s = pause_s

    def on_step(self, run: Any) -> None:
        if run.step == self._at_step:
            os.kill(self._pid, signal.SIGINT)
        if run.step >= self._at_step:
            time.sleep(self._pause_s)  # otherwise the run might finish before the signal has reached its workers


def largest_difference(one: Result, other: Result) -> float:
    assert one.model is not None
    assert other.model is not None
    differences = [torch.zeros(())]
    ours, theirs = one.model.state_dict(), other.model.state_dict()
    differences += [(ours[name] - theirs[name]).abs().max() for name in ours]
    return float(torch.stack(differences).max())


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except UsageError as error:
        return str(error)
    return ""


def main(storage: str) -> dict[str, Any]:
    plain = fit(config_of(storage, "plain"), **objects())
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    told: dict[str, Any] = {}

    # A configuration that asks for several workers is enough where Ray runs.
    config = config_of(storage, "killed", scaling={"num_workers": [1, 2]})
    hooks = [KillsOnce(Path(storage) / "marker")]
    killed = fit(config, **objects(), hooks=hooks)
    told["killed"] = killed.summary
    told["difference"] = largest_difference(killed, plain)

    again = fit(config, **objects(), hooks=hooks)
    told["again"] = (again.summary == killed.summary, largest_difference(again, killed))
    told["another_rate"] = refusal(
        lambda: fit(config_of(storage, "killed", optimizer={"lr": 0.5}), **objects(), hooks=hooks, scaling={})
    )
    # The first checkpoint comes with the stop, and this process goes on from there.
    hooks_of_stopped = [Interrupts(5, pause_s=0.5)]
    stopped = fit(config_of(storage, "stopped"), **objects(), hooks=hooks_of_stopped, scaling={"num_workers": 1})
    told["stopped"] = (stopped.summary["status"], stopped.summary["step"])
    resumed = fit(config_of(storage, "stopped"), **objects(), hooks=[Interrupts(0, pause_s=0.0)])
    told["resumed"] = (resumed.summary["status"], resumed.summary["step"], largest_difference(resumed, plain))
    told["actors"] = [each for each in ray.util.list_named_actors() if each.startswith("coordinator of")]
    told["ray"] = ray.is_initialized()
    return told


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
