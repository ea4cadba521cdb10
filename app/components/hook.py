"""What a hook may have, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

Draw = Callable[[int, dict[str, float]], None]  # has trackers draw the figures of a step


@dataclass
class HookContext:
    """What a hook is given.

    Attributes:
        model: the plain model; under fsdp its parameters are DTensors, of which this rank has its shard.
        step: the last one that is done, 0 before the first.
        ended_early: why a hook has ended the run, "" if none has.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int = 0
    num_steps: int = 0
    rank: int = 0
    world_size: int = 1
    attempt: int = 0
    ended_early: str = ""
    _draw: Draw | None = None

    def log(self, values: Mapping[str, float]) -> None:
        """Have trackers draw these as `hooks/…`; those of rank 0 count."""
        if self._draw is not None:
            self._draw(self.step, {f"hooks/{name}": float(value) for name, value in values.items()})

    def end_run(self, reason: str) -> None:
        """Finish the run at the next agreed step. One rank is enough, but only rank 0's reason is kept."""
        self.ended_early = reason


class Hook:
    """What a hook may have; it need not derive from this class. All ranks call each method after the same step.

    A state that must survive is given by `state_dict`: tensors, numbers, and dictionaries of them, under the same names
    and in the same shapes from `setup` on. It is in every checkpoint, and newcomers get it from who has it.
    """

    def setup(self, run: HookContext) -> None:
        """Prepare for a model whose weights are not there yet, before a state is restored."""

    def on_start(self, run: HookContext) -> None:
        """Begin an attempt; after any failure or resize too."""

    def on_step(self, run: HookContext) -> None:
        """Follow an update of the weights. An error in it costs the steps since the last copy of the state."""

    def on_validation(self, run: HookContext, metrics: Mapping[str, float]) -> None:
        """Follow a validation; `metrics` are the same on all ranks."""

    def on_checkpoint(self, run: HookContext) -> None:
        """Precede a checkpoint of `run.step`."""

    def on_end(self, run: HookContext) -> None:
        """Follow the last step of the run, finished or stopped."""

    # Beside these: state_dict() -> dict, load_state_dict(dict), and validating(run) -> a context for validation.
