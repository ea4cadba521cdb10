"""Number formats. A neutral object: full precision is a `Precision` whose autocast does nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from app.config import PrecisionConfig


@dataclass(frozen=True)
class Precision:
    """Where and in which formats a model computes.

    Args:
        device: where parameters live.
        param_dtype: what parameters, gradients and optimizer state are kept in.
        autocast_dtype: what matrix products run in, None for `param_dtype` itself.
    """

    device: torch.device
    param_dtype: torch.dtype = torch.float32
    autocast_dtype: torch.dtype | None = None

    def autocast(self) -> AbstractContextManager[object]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast_dtype)

    def convert(self, model: nn.Module) -> nn.Module:
        return model.to(device=self.device, dtype=self.param_dtype)

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.autocast_dtype or self.param_dtype


def build_precision(config: PrecisionConfig, device: torch.device) -> Precision:
    kind = config.kind
    if kind == "auto":
        kind = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    if kind == "fp64":
        return Precision(device, torch.float64)
    return Precision(device, autocast_dtype=torch.bfloat16 if kind == "bf16" else None)
