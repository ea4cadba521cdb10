"""Interface of hooks, and the context that their methods receive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

Draw = Callable[[int, dict[str, float]], None]  # (step, figures), draws the figures in all trackers


@dataclass
class HookContext:
    """State of the run that every method of a hook receives.

    Attributes:
        model: the plain model; under fsdp its parameters are DTensors, and this rank holds its shard of each.
        step: the last finished step, 0 before the first.
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
        """Draw values as `hooks/…` in all trackers; rank 0's values count."""
        if self._draw is not None:
            self._draw(self.step, {f"hooks/{name}": float(value) for name, value in values.items()})

    def end_run(self, reason: str) -> None:
        """Finish the run at the next agreed step.

        A call on one rank is enough, but only rank 0's reason is kept.
        """
        self.ended_early = reason


class Hook:
    """Methods that a hook may have; deriving from this class is optional.

    All ranks call each method after the same step. A hook returns a state that must survive from `state_dict`: tensors,
    numbers, and dictionaries of them, under the same names and in the same shapes from `setup` on. The state is in
    every checkpoint, and new workers receive it from workers that hold it.
    """

    def setup(self, run: HookContext) -> None:
        """Prepare for a model whose weights and state are not restored yet."""

    def on_start(self, run: HookContext) -> None:
        """Begin an attempt, also after a failure or a resize."""

    def on_step(self, run: HookContext) -> None:
        """Act after an update of the weights.

        An error here costs the steps since the last copy of the state.
        """

    def on_validation(self, run: HookContext, metrics: Mapping[str, float]) -> None:
        """Act after a validation; `metrics` are the same on all ranks."""

    def on_checkpoint(self, run: HookContext) -> None:
        """Act before a checkpoint of `run.step`."""

    def on_end(self, run: HookContext) -> None:
        """Act after the last step of the run, finished or stopped."""

    # Further methods: state_dict() -> dict, load_state_dict(dict), and validating(run) -> a context for validation.
