"""Patches for the processes of a drill, as `drill(..., patch=write_no_code)` applies them. None breaks a claim."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import steadfast.loop.worker_state
import steadfast.parallel.compiled
from steadfast.checkpoint.durable import Checkpoints
from steadfast.world.groups import Groups


def write_no_code() -> None:
    """Compile by a backend that traces, and has autograd trace, but writes no machine code: for speed."""

    def compile_quickly(forward: Callable[..., Any]) -> Any:
        return torch.compile(forward, dynamic=False, backend="aot_eager")

    steadfast.parallel.compiled._compile = compile_quickly
    steadfast.loop.worker_state.probe = lambda device: None  # type: ignore[attr-defined]


def put_all_beyond_reach() -> None:
    """Have the communicator reach nothing where it is, as one of GPUs does not reach the host's memory."""

    def reaches(self: Groups, tensor: Tensor) -> bool:
        return False

    Groups.reaches = reaches


def wait_for_storage() -> None:
    """So that each checkpoint is there that the schedule names, however slow the disk is."""
    honest = Checkpoints.save

    def save(self: Checkpoints, *args: Any, **named: Any) -> None:
        honest(self, *args, **named)
        self.wait_for_commit(60.0)

    Checkpoints.save = save
