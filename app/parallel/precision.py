"""Number formats, and what they mean for backward and update. Full precision is a `Precision` that adds nothing."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from app.config import PrecisionConfig
from app.world.device import Gpu


@dataclass(frozen=True)
class Precision:
    """Where and in which formats a model computes. It owns backward, unscaling and the optimizer call."""

    device: torch.device  # where parameters live
    param_dtype: torch.dtype = torch.float32  # of parameters, gradients and optimizer state
    autocast_dtype: torch.dtype | None = None  # of matrix products, None for `param_dtype` itself

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.autocast_dtype or self.param_dtype

    @property
    def lag_steps(self) -> int:
        """Return how many steps later a step's numbers can be read without waiting for the device."""
        return 1 if self.device.type == "cuda" else 0

    def convert(self, model: nn.Module) -> nn.Module:
        """Return the model on the device, in the format that parameters are kept in; frozen parts keep their own."""
        self._cast(model.to(self.device))
        return model

    def _cast(self, module: nn.Module) -> None:
        # A frozen base in 16 bits needs half the memory, and rounds nothing that anybody learns. But in float64, which
        # shows that results are equal, everything is.
        if self.param_dtype != torch.float64 and _is_frozen(module):
            return
        for param in module.parameters(recurse=False):
            param.data = self._widened(param.data)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, self._widened(buffer))
        for child in module.children():
            self._cast(child)

    def _widened(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.param_dtype) if tensor.is_floating_point() else tensor

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of a forward."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast_dtype)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a scalar loss to those that are there."""
        loss.backward()

    def unscale(self, gradients: list[Tensor], factor: float | Tensor) -> None:
        """Multiply all gradients by `factor` in place, together with whatever `backward` has scaled them by."""
        if isinstance(factor, Tensor):
            # Not a number: reading it from the device would make the host wait in every step.
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
        elif factor != 1.0:
            torch._foreach_mul_(gradients, factor)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer."""
        optimizer.step()

    def state_dict(self) -> dict[str, Tensor]:
        """Return live references to what a checkpoint must hold of this: nothing, for formats without a loss scale."""
        return {}


def _is_frozen(module: nn.Module) -> bool:
    """Return whether the module has parameters, and none of them trains."""
    trains = [param.requires_grad for param in module.parameters()]
    return bool(trains) and not any(trains)


def build_precision(config: PrecisionConfig, device: torch.device, gpus: Sequence[Gpu] = ()) -> Precision:
    """Return the format that the configuration names; "auto" is bf16 where all `gpus` of the world have it, else fp32.

    What it is for a model's parameters does not depend on the world.
    """
    kind = config.kind
    if kind == "fp64":
        return Precision(device, torch.float64)
    # Not on a CPU unless it is asked for: most of them emulate bf16.
    if kind == "bf16" or (kind == "auto" and gpus and all(gpu.has_bf16 for gpu in gpus)):
        return Precision(device, autocast_dtype=torch.bfloat16)
    return Precision(device)
