"""Number formats, and what they mean for backward and update. Full precision is a `Precision` that adds nothing."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from app.config import LossScaleConfig, PrecisionConfig
from app.parallel.fixed_point import FixedPoint
from app.world.device import Gpu


class Scaling(Protocol):
    """Something that adapts to gradients so that they fit into their format: the same on all ranks, and saved."""

    @property
    def scale(self) -> Tensor | float:
        """Return what losses are multiplied by."""
        ...

    def overflowed(self, grad_norm: Tensor) -> bool:
        """Return whether gradients of the step did not fit, and may fit into what comes of it. Behind the gate."""
        ...

    def after_overflow(self) -> None:
        """Adapt to an overflow."""
        ...

    def after_update(self) -> None:
        """Adapt to an update without one."""
        ...

    def begin_anew(self) -> None:
        """Forget what the run has taught."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return live references to what a checkpoint must hold."""
        ...


class LossScale:
    """What losses are multiplied by in fp16, whose smallest number is 6e-8: dynamic, and a part of the run's state.

    As torch.amp.GradScaler adapts it (docs.pytorch.org/docs/stable/amp.html), but that all ranks adapt it alike: by the
    norm of the whole gradient, which each of them knows.
    """

    def __init__(self, config: LossScaleConfig, device: torch.device) -> None:
        self._config = config
        self.scale = torch.tensor(config.initial, device=device)
        self._num_updates = torch.tensor(0, device=device)  # since it last changed

    def begin_anew(self) -> None:
        """Go back to the initial scale."""
        self.scale.fill_(self._config.initial)
        self._num_updates.zero_()

    def overflowed(self, grad_norm: Tensor) -> bool:
        """Return whether a smaller scale may help: gradients are not finite, and it is not down to 1 yet."""
        return not bool(grad_norm.isfinite()) and float(self.scale) > 1.0

    def after_overflow(self) -> None:
        """Adapt the scale to an overflow."""
        self.scale.div_(self._config.factor).clamp_(min=1.0)
        self._num_updates.zero_()

    def after_update(self) -> None:
        """Adapt the scale to an update without one."""
        self._num_updates.add_(1)
        if int(self._num_updates) < self._config.window:
            return
        self._num_updates.zero_()
        if math.isfinite(float(self.scale) * self._config.factor):
            self.scale.mul_(self._config.factor)

    def state_dict(self) -> dict[str, Tensor]:
        """Return live references to what a checkpoint must hold."""
        return {"scale": self.scale, "num_updates": self._num_updates}


@dataclass(frozen=True)
class Precision:
    """Where and in which formats a model computes. It owns backward, unscaling and the optimizer call."""

    device: torch.device  # where parameters live
    param_dtype: torch.dtype = torch.float32  # of parameters, gradients and optimizer state
    autocast_dtype: torch.dtype | None = None  # of matrix products, None for `param_dtype` itself
    scaling: Scaling | None = None

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.autocast_dtype or self.param_dtype

    @property
    def lag_steps(self) -> int:
        """Return how many steps later a step's numbers can be read without waiting for the device."""
        return 1 if self.device.type == "cuda" else 0

    def convert(self, model: nn.Module) -> nn.Module:
        """Return the model on the device, in the format that parameters are kept in; frozen parts keep their own."""
        self.cast(model.to(self.device))
        return model

    def cast(self, module: nn.Module) -> None:
        """Put the parameters and buffers of a module into the format that they are kept in, where they are."""
        # A frozen base in 16 bits needs half the memory, and rounds nothing that anybody learns. But in float64, which
        # shows that results are equal, everything is.
        if self.param_dtype != torch.float64 and _is_frozen(module):
            return
        for param in module.parameters(recurse=False):
            param.data = self._widened(param.data)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, self._widened(buffer))
        for child in module.children():
            self.cast(child)

    def _widened(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.param_dtype) if tensor.is_floating_point() else tensor

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of a forward."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast_dtype)

    @property
    def loss_scale(self) -> float | Tensor:
        """Return what `backward` multiplies gradients by."""
        return 1.0 if self.scaling is None else self.scaling.scale

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a scalar loss, times `loss_scale`, to those that are there."""
        if self.scaling is not None:
            loss = loss * self.scaling.scale
        loss.backward()

    def rescale(self, gradients: list[Tensor], factor: float | Tensor) -> None:
        """Multiply all gradients by `factor` in place."""
        if isinstance(factor, Tensor):
            # Not a number: reading it from the device would make the host wait in every step, as it has to where it
            # keeps the gradients itself.
            torch._foreach_mul_(gradients, factor.to(gradients[0].device, gradients[0].dtype))
        elif factor != 1.0:
            torch._foreach_mul_(gradients, factor)

    def update(self, optimizer: torch.optim.Optimizer, grad_norm: Tensor) -> bool:
        """Step the optimizer, unless gradients have overflowed. Return whether they have.

        Args:
            grad_norm: () of the whole gradient, the same on all ranks.
        """
        if self.scaling is None:
            optimizer.step()
            return False
        overflowed = self.scaling.overflowed(grad_norm)
        if overflowed:
            self.scaling.after_overflow()
        else:
            optimizer.step()
            self.scaling.after_update()
        return overflowed

    def begin_anew(self) -> None:
        """Forget what the run has taught about its numbers."""
        if self.scaling is not None:
            self.scaling.begin_anew()

    def state_dict(self) -> dict[str, Tensor]:
        """Return live references to what a checkpoint must hold of this: nothing, where nothing adapts to gradients."""
        return {} if self.scaling is None else self.scaling.state_dict()


def _is_frozen(module: nn.Module) -> bool:
    """Return whether the module has parameters, and none of them trains."""
    trains = [param.requires_grad for param in module.parameters()]
    return bool(trains) and not any(trains)


def build_precision(
    config: PrecisionConfig, device: torch.device, gpus: Sequence[Gpu] = (), fixed_point: FixedPoint | None = None
) -> Precision:
    """Return the format that the configuration names; "auto" is bf16 where all `gpus` of the world have it, else fp32.

    What it is for a model's parameters does not depend on the world.

    Args:
        fixed_point: how gradients are added up in an exact run.
    """
    kind = config.kind
    if kind == "fp64":
        return Precision(device, torch.float64, scaling=fixed_point)
    # Not on a CPU unless it is asked for: most of them emulate bf16.
    if kind == "bf16" or (kind == "auto" and gpus and all(gpu.has_bf16 for gpu in gpus)):
        return Precision(device, autocast_dtype=torch.bfloat16, scaling=fixed_point)
    if kind == "fp16":
        return Precision(device, autocast_dtype=torch.float16, scaling=LossScale(config.loss_scale, device))
    return Precision(device, scaling=fixed_point)
