"""Dtypes of the computation, and their effect on backward and update.

In full precision a `Precision` changes nothing.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from steadfast.config import PrecisionConfig
from steadfast.parallel.fixed_point import FixedPoint
from steadfast.world.device import Gpu

_KINDS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Scaling(Protocol):
    """Factor that adapts to the range of gradients.

    It is equal on all ranks, and part of the checkpointed state.
    """

    @property
    def scale(self) -> Tensor | float:
        """Return the factor of losses."""
        ...

    def overflowed(self, grad_norm: Tensor) -> bool:
        """Return whether gradients overflowed and a retry may fit, after the gate."""
        ...

    def after_overflow(self) -> None:
        """Adapt to an overflow."""
        ...

    def after_update(self) -> None:
        """Adapt to an update without an overflow."""
        ...

    def begin_anew(self) -> None:
        """Reset to the initial state."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return live references to the checkpointed tensors."""
        ...


class LossScale:
    """Dynamic factor of losses in fp16, a part of the run's state.

    The smallest number in fp16 is 6e-8. The scale adapts as in torch.amp.GradScaler
    (docs.pytorch.org/docs/stable/amp.html), but by the norm of the whole gradient, which is the same on all ranks.
    """

    # GradScaler's defaults.
    initial = 65536.0
    factor = 2.0
    window = 2000  # updates without an overflow after which the scale rises

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.tensor(self.initial, device=device)
        self._num_updates = torch.tensor(0, device=device)  # since the last change of the scale

    def begin_anew(self) -> None:
        """Reset to the initial scale."""
        self.scale.fill_(self.initial)
        self._num_updates.zero_()

    def overflowed(self, grad_norm: Tensor) -> bool:
        """Return whether a smaller scale may make the gradients finite."""
        # The scale does not fall below 1. If gradients overflow even there, another try would end in the same way.
        return not bool(grad_norm.isfinite()) and float(self.scale) > 1.0

    def after_overflow(self) -> None:
        """Adapt the scale to an overflow."""
        self.scale.div_(self.factor).clamp_(min=1.0)
        self._num_updates.zero_()

    def after_update(self) -> None:
        """Adapt the scale to an update without an overflow."""
        self._num_updates.add_(1)
        if int(self._num_updates) < self.window:
            return
        self._num_updates.zero_()
        if math.isfinite(float(self.scale) * self.factor):
            self.scale.mul_(self.factor)

    def state_dict(self) -> dict[str, Tensor]:
        """Return live references to the checkpointed tensors."""
        return {"scale": self.scale, "num_updates": self._num_updates}


@dataclass(frozen=True)
class Precision:
    """Device and dtypes of a model; runs backward, unscaling and update."""

    device: torch.device  # of the computation, and of parameters unless they are offloaded
    param_dtype: torch.dtype = torch.float32  # of parameters, gradients and optimizer state
    autocast_dtype: torch.dtype | None = None  # of matrix products, None for `param_dtype` itself
    scaling: Scaling | None = None

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.autocast_dtype or self.param_dtype

    @property
    def kind(self) -> str:
        """Return the name of `compute_dtype` in the configuration."""
        return _KINDS[self.compute_dtype]

    @property
    def lag_steps(self) -> int:
        """Return the steps after which results are readable without a wait."""
        return 1 if self.device.type == "cuda" else 0

    def convert(self, model: nn.Module) -> nn.Module:
        """Move the model to the device, and `cast` the model."""
        self.cast(model.to(self.device))
        return model

    def cast(self, module: nn.Module) -> None:
        """Cast the parameters and buffers of a module to `param_dtype` in place."""
        # A frozen base in 16 bits needs half the memory and is never updated, so rounding does no harm. In float64,
        # which serves to show that results are equal, everything is cast.
        if self.param_dtype != torch.float64 and _is_frozen(module):
            return
        for param in module.parameters(recurse=False):
            param.data = self._widened(param.data)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, self._widened(buffer))
        for child in module.children():
            self.cast(child)

    def _widened(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return tensor.to(self.param_dtype)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of a forward."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast_dtype)

    @property
    def loss_scale(self) -> float | Tensor:
        """Return the factor that `backward` applies to gradients."""
        if self.scaling is None:
            return 1.0
        return self.scaling.scale

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a scalar loss, times `loss_scale`, to existing ones."""
        if self.scaling is not None:
            loss = loss * self.scaling.scale
        loss.backward()

    def rescale(self, gradients: list[Tensor], factor: float | Tensor) -> None:
        """Multiply all gradients by `factor` in place."""
        if isinstance(factor, Tensor):
            # A tensor stays a tensor, because reading its value would make the host wait in every step. Only gradients
            # in host memory need that wait.
            torch._foreach_mul_(gradients, factor.to(gradients[0].device, gradients[0].dtype))
        elif factor != 1.0:
            torch._foreach_mul_(gradients, factor)

    def update(self, optimizer: torch.optim.Optimizer, grad_norm: Tensor) -> bool:
        """Step the optimizer unless gradients have overflowed.

        Args:
            grad_norm: () norm of the whole gradient, the same on all ranks.

        Returns:
            Whether gradients have overflowed, so that no parameter was updated.
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
        """Reset all values that have adapted to gradients."""
        if self.scaling is not None:
            self.scaling.begin_anew()

    def state_dict(self) -> dict[str, Tensor]:
        """Return live references to the checkpointed tensors, {} without scaling."""
        return {} if self.scaling is None else self.scaling.state_dict()


def _is_frozen(module: nn.Module) -> bool:
    """Return whether the module has parameters and all are frozen."""
    trains = [param.requires_grad for param in module.parameters()]
    return bool(trains) and not any(trains)


def build_precision(
    config: PrecisionConfig, device: torch.device, gpus: Sequence[Gpu] = (), fixed_point: FixedPoint | None = None
) -> Precision:
    """Return the configured precision.

    "auto" is bf16 if all `gpus` of the world support it, else fp32. The dtype of parameters is the same in any world.

    Args:
        fixed_point: sums gradients in an exact run.
    """
    kind = config.kind
    if kind == "fp64":
        return Precision(device, torch.float64, scaling=fixed_point)
    # On a CPU only if it is configured, because most CPUs emulate bf16.
    if kind == "bf16" or (kind == "auto" and gpus and all(gpu.has_bf16 for gpu in gpus)):
        return Precision(device, autocast_dtype=torch.bfloat16, scaling=fixed_point)
    if kind == "fp16":
        return Precision(device, autocast_dtype=torch.float16, scaling=LossScale(device))
    return Precision(device, scaling=fixed_point)
