"""A program of a user's own that trains by `fit`, alone or under torchrun: script.py STORAGE NAME STEPS."""

import json
import os
import sys
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

from steadfast import Config, Result, Sums, fit


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
    inputs, targets = batch
    return Sums(F.mse_loss(model(inputs), targets, reduction="sum"), targets.numel())


def line(size: int) -> TensorDataset:
    """Return `size` points of a line in four dimensions, with noise."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(size, 4, generator=generator)
    noise = torch.randn(size, 1, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True) + 0.1 * noise)


def halved(step: int, num_steps: int) -> float:
    return 1.0 if step <= 6 else 0.5


class Counts:
    """A hook with a state, which goes into checkpoints."""

    def __init__(self) -> None:
        self.steps = torch.zeros(1)

    def on_step(self, run: object) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Tensor]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.steps = state["steps"].clone()


def train(
    storage: str,
    name: str,
    steps: int,
    hidden: int = 8,
    hooks: Sequence[Counts] = (),
    lr: float = 0.05,
    return_finished: bool = False,
) -> Result:
    config = Config.model_validate(
        {
            "run": {"name": name, "storage": storage, "steps": steps},
            "batch": {"global_size": 12, "microbatch_size": 4},
            "optimizer": {"lr": lr},
            "precision": {"kind": "fp64"},
            "checkpoint": {"every": "4 steps"},
            "trackers": [],
        }
    )
    torch.manual_seed(int(os.environ.get("RANK", "0")))  # other weights on each rank
    model = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 1))
    optimizer = partial(torch.optim.SGD, momentum=0.9)
    return fit(
        config,
        model=model,
        dataset=line(120),
        validation=line(20),
        task=squared_error,
        optimizer=optimizer,
        schedule=halved,
        hooks=hooks,
        return_finished=return_finished,
    )


if __name__ == "__main__":
    storage, name, steps = sys.argv[1:]
    result = train(storage, name, int(steps), hooks=[Counts()])
    assert result.model is not None
    weights = {name: tensor.tolist() for name, tensor in result.model.state_dict().items()}
    # In one piece: ranks share their standard output.
    print(f"rank {os.environ.get('RANK', '0')}: {json.dumps({**result.summary, 'weights': weights})}\n", end="")
