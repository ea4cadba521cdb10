"""Hooks of a run: their calls, requests and checkpointed state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from steadfast.checkpoint.state import Tensors
from steadfast.config import EarlyStoppingConfig, EmaConfig, HookConfig
from steadfast.config.target import build_target
from steadfast.errors import TrainingError
from steadfast.hooks.early_stopping import EarlyStopping
from steadfast.hooks.ema import Ema
from steadfast.hooks.hook import Draw, Hook, HookContext
from steadfast.world.runtime import Outcome, Signals, World


class Hooks:
    """Hooks of a worker process, which live as long as its model."""

    def __init__(self, configs: Sequence[HookConfig], device: torch.device) -> None:
        self._hooks: dict[str, Any] = {}
        self._device = device
        self._state: dict[str, Tensors] = {}  # checkpointed tensors, by hook
        self._run: HookContext | None = None
        for index, config in enumerate(configs):
            hook = _build(config, f"hooks.{index}")
            name = type(hook).__name__
            # A hook is named by its class rather than by its index, so that its state is found after another hook was
            # inserted before it.
            taken = sum(name == each.rstrip("0123456789") for each in self._hooks)
            if taken:
                name = f"{name}{taken + 1}"
            self._hooks[name] = hook

    @property
    def ended_early(self) -> str:
        """Reason why a hook has ended the run, "" if none has."""
        return "" if self._run is None else self._run.ended_early

    @property
    def act_on_steps(self) -> bool:
        """Return whether a hook of the user's own has a method `on_step`."""
        methods = [getattr(hook, "on_step", None) for hook in self._hooks.values()]
        return any(getattr(each, "__func__", each) not in (None, Hook.on_step, Ema.on_step) for each in methods)

    def setup(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Give model and optimizer to every hook, in the first call only."""
        if self._run is None:
            self._run = HookContext(model, optimizer)
            self._call("setup")

    def state_dict(self) -> Tensors:
        """Return the current state, always in the same tensors."""
        for name, hook in self._hooks.items():
            if hasattr(hook, "state_dict") and (current := hook.state_dict()):
                self._take(self._state.setdefault(name, {}), current, name)
        return self._state

    def begin(self, step: int, num_steps: int, world: World, draw: Draw) -> None:
        """Begin an attempt after `step` from the tensors of `state_dict`."""
        assert self._run is not None
        world.progress.enter("hooks")
        self._run = HookContext(
            self._run.model, self._run.optimizer, step, num_steps, world.rank, world.size, world.attempt, _draw=draw
        )
        for name, hook in self._hooks.items():
            if hasattr(hook, "load_state_dict"):
                hook.load_state_dict(_like(hook.state_dict(), self._state.get(name, {})))
        self._call("on_start")

    def on_step(self, step: int) -> None:
        if self._run is not None:
            self._run.step = step
        self._call("on_step")

    def on_validation(self, metrics: Mapping[str, float]) -> None:
        self._call("on_validation", metrics)

    def on_checkpoint(self) -> None:
        self._call("on_checkpoint")

    def end(self, outcome: Outcome, world: World) -> None:
        """Call `on_end` unless the attempt ended for another world."""
        if outcome.kind != "resized":
            world.progress.enter("hooks")
            self._call("on_end")

    def validating(self) -> ExitStack:
        """Return the context for validation, in which hooks may exchange the weights."""
        with ExitStack() as stack:
            for hook in self._hooks.values():
                if hasattr(hook, "validating"):
                    stack.enter_context(hook.validating(self._run))
            return stack.pop_all()

    def signals(self, signals: Signals) -> Signals:
        """Add the hooks' requests to the signals from outside."""
        return replace(signals, finish=bool(self.ended_early))

    def _call(self, method: str, *arguments: Any) -> None:
        for hook in self._hooks.values():
            if hasattr(hook, method):
                getattr(hook, method)(self._run, *arguments)

    def _take(self, held: Tensors, current: Mapping[str, Any], name: str) -> None:
        """Copy the hooks' current state into the checkpointed tensors."""
        for key, value in current.items():
            match value:
                case Mapping():
                    self._take(held.setdefault(key, {}), value, f"{name}.{key}")
                case Tensor() | float() | int():
                    # The first tensor of each key stays, because checkpoints and restores refer to it. A hook that
                    # returns the same tensor again needs no copy.
                    tensor = self._as_tensor(value)
                    if held.setdefault(key, tensor) is not tensor:
                        held[key].copy_(tensor)
                case _:
                    raise TrainingError(
                        f"the hook {name} wants {key}, a {type(value).__name__}, in checkpoints; they hold tensors, "
                        "numbers, and dictionaries of them"
                    )

    def _as_tensor(self, value: Tensor | float) -> Tensor:
        if isinstance(value, Tensor):
            return value
        # Python's floats have 64 bits. The tensor is on the device, because NCCL sends only tensors of the device.
        dtype = None
        if isinstance(value, float):
            dtype = torch.float64
        return torch.tensor(value, dtype=dtype, device=self._device)


def _build(config: HookConfig, key: str) -> Any:
    match config:
        case EmaConfig():
            return Ema(config)
        case EarlyStoppingConfig():
            return EarlyStopping(config)
    return build_target(config, key)


def _like(current: Mapping[str, Any], held: Tensors) -> dict[str, Any]:
    """Return the checkpointed values in the types of the hook's state."""
    state: dict[str, Any] = {}
    for key, value in current.items():
        if isinstance(value, Mapping):
            state[key] = _like(value, held[key])
        elif isinstance(value, Tensor):
            state[key] = held[key]
        else:
            state[key] = type(value)(held[key].item())
    return state
