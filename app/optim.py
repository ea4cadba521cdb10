"""Optimizers, gradient clipping and learning rate schedules."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from app.checkpoint.state import unsharded
from app.config import AdamWConfig, CosineConfig, ScheduleConfig


def build_optimizer(config: AdamWConfig, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW. Weight decay pulls on matrices only: on biases, gains and embeddings' one-dimensional kin it harms."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = bool(params) and all(p.is_cuda for p in params)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


def rescale_gradients(model: nn.Module, correction: float | Tensor, max_norm: float | None) -> Tensor:
    """Multiplies all gradients by `correction`, then clips them to a global norm of `max_norm`; one pass does both.

    Args:
        correction: a number, or () on the device, the same on every rank.

    Returns:
        The norm after the correction and before clipping, over the whole model even where gradients are sharded.
    """
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = unsharded(torch.nn.utils.get_total_norm(grads)) * correction
    if max_norm is not None:
        correction = (max_norm / (norm + 1e-6)).clamp(max=1.0) * correction
    if isinstance(correction, Tensor):
        torch._foreach_mul_(grads, correction.to(grads[0].dtype))
    elif correction != 1.0:
        torch._foreach_mul_(grads, correction)
    return norm


def update(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """One step at the rate `lr`; the gradients are gone afterwards."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def learning_rate(config: ScheduleConfig, peak: float, step: int, num_steps: int) -> float:
    """The rate of `step` (from 1): linear warmup to `peak`, then constant or a cosine down to its floor.

    A pure function of the step, so a schedule has no state to save; extending a finished run stretches the cosine.
    """
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    if not isinstance(config, CosineConfig):
        return peak
    floor = peak * config.min_lr_fraction
    done = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
