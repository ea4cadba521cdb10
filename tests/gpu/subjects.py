"""Models, data and optimizers that drills train: user code by `target`, as the app loads it.

A process dies by the variable DIES_AT, "point:update": in the backward of the update of that number, before its first
gradient ("first"), between two buckets ("between"), or in the update itself ("update").
"""

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tests.gpu.ranks import die

DIES_AT = "DRILL_DIES_AT"
SLEEPS_AT = "DRILL_SLEEPS_AT"  # update:seconds, by the device where there is one
COMPILES_AT = "DRILL_COMPILES_AT"  # update:seconds that a compilation takes
FAULTS_AT = "DRILL_FAULTS_AT"  # update in which a kernel traps, after which the process cannot use its device

attempt = 0  # of which updates are, set by whoever forms worlds
updates: list[tuple[Tensor, Tensor]] = []  # digests of the weights before and after, on the device
_num_updates = 0  # of this process


def _due(point: str) -> bool:
    where, _, number = os.environ.get(DIES_AT, ":0").partition(":")
    return where == point and int(number) == _num_updates + 1


def _seconds_of(variable: str) -> float | None:
    """Return the seconds that a variable names, once in its update; None before."""
    when, _, seconds = os.environ.get(variable, "0").partition(":")
    if int(when) != _num_updates + 1:
        return None
    del os.environ[variable]  # in one microbatch
    return float(seconds or 0)


class Net(nn.Sequential):
    """Layers of eight million weights: gradients travel in several buckets, and no kernel adds atomically."""

    def __init__(self, width: int = 1600, num_layers: int = 3, inputs: int = 64, classes: int = 8) -> None:
        layers: list[nn.Module] = [nn.Linear(inputs, width)]
        for _ in range(num_layers):
            layers += [nn.ReLU(), nn.Linear(width, width)]
        super().__init__(*layers, nn.ReLU(), nn.Linear(width, classes))
        parameters = list(self.parameters())
        # The last layer's gradients come first.
        parameters[-1].register_hook(_dying("first"))
        parameters[len(parameters) // 2].register_hook(_dying("between"))

    def blocks(self) -> list[nn.Module]:
        """Return the layers, which FSDP shards one by one."""
        return [layer for layer in self if isinstance(layer, nn.Linear)]

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            inputs = self._pause(inputs)
        for layer in self:
            inputs = layer(inputs)
        return inputs

    def _pause(self, inputs: Tensor) -> Tensor:
        """Do what the variables demand of this update."""
        if (seconds := _seconds_of(SLEEPS_AT)) is not None:
            _sleep(seconds, inputs.device)
        if _seconds_of(FAULTS_AT) is not None:
            torch._assert_async(torch.zeros(1, device=inputs.device))
        if (seconds := _seconds_of(COMPILES_AT)) is not None:
            return _compile(seconds)(inputs)
        return inputs


def _dying(point: str) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        if _due(point):
            die()

    return hook


def _sleep(seconds: float, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(int(seconds * 1.7e9))  # in cycles of the device's clock
    else:
        time.sleep(seconds)


def _compile(seconds: float) -> Callable[[Tensor], Tensor]:
    """Return a function that changes nothing, and is compiled when it is called first."""

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        time.sleep(seconds)
        return graph

    compiled: Callable[[Tensor], Tensor] = torch.compile(lambda inputs: inputs * 1.0, backend=backend)
    return compiled


class Points:
    """Random points of random classes, the same in every process."""

    counts_vary = False

    def __init__(self, num_samples: int = 4096, inputs: int = 64, classes: int = 8) -> None:
        generator = torch.Generator().manual_seed(7)
        self._inputs = torch.randn(num_samples, inputs, generator=generator)
        self._targets = torch.randint(classes, (num_samples,), generator=generator)

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        return self._inputs[index], self._targets[index]


class WatchedAdamW(torch.optim.AdamW):
    """AdamW that takes a digest of the weights around every update, on the device and without waiting for it."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        params = list(params)
        super().__init__(params, lr=lr, fused=params[0].is_cuda)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        global _num_updates
        # State is created by a step at rate 0, which is no update. Nor are those that the app tries before its first
        # attempt.
        if not self.param_groups[0]["lr"] or not attempt:
            super().step(closure)
            return
        if _due("update"):
            die()
        before = _digest(self)
        super().step(closure)
        updates.append((before, _digest(self)))
        _num_updates += 1


class CountingUp(torch.optim.Optimizer):
    """Adds 1 to every weight in every update: a state that says of itself which step it is of."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if group["lr"]:
                torch._foreach_add_(group["params"], 1.0)


class Zeros(Net):
    """A Net that begins with all weights 0."""

    def __init__(self, **args: int) -> None:
        super().__init__(**args)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


def _digest(optimizer: torch.optim.Optimizer) -> Tensor:
    """Return the sum of all weights' bits, each weighted by its parameter's place, () int64."""
    total = torch.zeros((), dtype=torch.int64)
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"], 1):
            whole = parameter.detach()
            local = whole.to_local() if hasattr(whole, "to_local") else whole
            total = total.to(local.device)
            total = total + local.contiguous().view(torch.int32).sum(dtype=torch.int64) * place
    return total
