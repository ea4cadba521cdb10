"""Interface of hooks, and the context that their methods receive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Draw = Callable[[int, dict[str, Any]], None]  # (step, values), draws the values in all trackers


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

    def log(self, values: Mapping[str, Any]) -> None:
        """Draw values as `hooks/…` in all trackers; rank 0's values count.

        Args:
            values: numbers, texts, images and tables, by name. An image is a tensor (height, width) or (channels,
                height, width), an array (height, width) or (height, width, channels), or an image of Pillow;
                floating-point values go from 0 to 1. A table is a list of dictionaries, one for each row.
        """
        if self._draw is not None:
            self._draw(self.step, {f"hooks/{name}": value for name, value in values.items()})

    def end_run(self, reason: str) -> None:
        """Finish the run at `step`, with a last validation and checkpoint.

        A call on one rank is enough, in `on_start`, `on_step`, `on_validation` or `on_checkpoint`. All ranks agree on
        the end right after that method, on the reason of the lowest rank that gives one.
        """
        self.ended_early = reason


class Hook:
    """Methods that a hook may have; deriving from this class is optional.

    All ranks call each method after the same step. A validation or checkpoint in which a worker died is made up for by
    the next attempt; a hook with a state sees each validation once. A hook returns a state that must survive from
    `state_dict`: tensors, numbers, and dictionaries of them, under the same names and in the same shapes from `setup`
    on. The state is in every checkpoint, and new workers receive it from workers that hold it.
    """

    def setup(self, run: HookContext) -> None:
        """Prepare for a model whose weights and state are not restored yet."""

    def on_start(self, run: HookContext) -> None:
        """Begin an attempt, also after a failure or a resize."""

    def on_step(self, run: HookContext) -> None:
        """Act after an update of the weights, when the gradients are None.

        An error here costs the steps since the last copy of the state.
        """

    def on_validation(self, run: HookContext, metrics: Mapping[str, float]) -> None:
        """Act after a validation; `metrics` are the same on all ranks."""

    def on_checkpoint(self, run: HookContext) -> None:
        """Act before a checkpoint of `run.step`."""

    def on_end(self, run: HookContext) -> None:
        """Act when the run has finished or was stopped.

        Not called after a failure or a resize.
        """

    # Further methods: state_dict() -> dict, load_state_dict(dict), and validating(run) -> a context for validation.
