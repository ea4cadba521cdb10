"""Forwards that change more than gradients: what a trial undoes, and what the first step names."""

import random
from collections import deque
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steadfast.loop.side_effects import undone, values_of
from steadfast.tasks import Sums
from steadfast.tasks.own import own_task


class Net(nn.Module):
    """Changes everything that a forward can change."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.clipped = nn.Linear(3, 3), nn.Linear(3, 3)
        self.replaced = nn.Parameter(torch.ones(2))
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("table", torch.zeros(0), persistent=False)
        self.hidden: Tensor | None = None
        self.queue, self.calls, self.rate = torch.zeros(2), 0, float("nan")
        self.recent, self.counts, self.last = deque([0], maxlen=2), {"a": 0}, [0, 0]
        self.generator, self.numpy, self.python = torch.Generator(), np.random.default_rng(0), random.Random(0)
        self.array = np.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.clipped.weight.data.clamp_(-0.01, 0.01)
        self.replaced.data = self.replaced.data * 2
        self.kept += 1
        self.table = torch.ones(3)
        self.queue[0] += 1
        self.array += 1
        self.calls, self.hidden, self.made = self.calls + 1, x.detach(), nn.Linear(1, 1)
        self.recent.append(self.calls)
        self.counts["b"] = 1
        self.last[0] += 1
        torch.rand((), generator=self.generator)
        self.numpy.random(), self.python.random()
        y: Tensor = self.layer(x)
        self.shown = y
        return y


class Task(nn.Module):
    """Has state of its own, beside that of the model."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(3))
        self.warm = 0.0

    def loss(self, model: nn.Module, batch: Tensor) -> Sums:
        self.warm += 0.5
        y = model(batch)
        self.center.data += y.detach().mean(0)
        return Sums((y - self.center).square().sum(), len(y))


CHANGED = (
    "clipped.weight clipped.bias replaced kept table queue array calls hidden made made.weight made.bias "
    "made.in_features made.out_features recent counts last generator numpy python"
)


def test_a_trial_leaves_no_trace_and_each_change_has_a_name() -> None:
    net, task = Net(), own_task(Task(), "mine:Task")
    before, held = values_of(net, task), {name: id(value) for name, value in vars(net).items()}
    memory = net.replaced.data_ptr()
    net.clipped.bias.data.fill_(1.0)
    for fails in (False, True):
        with pytest.raises(ValueError, match="of the task") if fails else nullcontext(), undone(net, task):
            task.loss(net, torch.randn(4, 3))
            if fails:
                raise ValueError("of the task")
        assert values_of(net, task) == before | {"Net.clipped.bias": values_of(net)["Net.clipped.bias"]}
        assert {name: id(value) for name, value in vars(net).items()} == held
        assert net.replaced.data_ptr() == memory
    task.loss(net, torch.randn(4, 3))
    after = values_of(net, task)
    names = {name for name in {**before, **after} if before.get(name) != after.get(name)}
    assert names == {f"Net.{name}" for name in CHANGED.split()} | {"Task.center", "Task.warm"}


def test_caches_of_torch_and_of_gradients_have_no_name() -> None:
    """Neither weights that a layer keeps in a list, nor derived ones, nor the mode are state."""
    net = nn.Sequential(nn.LSTM(3, 3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    before = values_of(net)
    net[1](net.eval()[0](torch.randn(2, 3))[0]).sum().backward()
    assert values_of(net) == before
