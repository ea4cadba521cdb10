"""Hooks of a run: their calls, requests and checkpointed state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
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
from steadfast.world.control import any_rank, gather_objects
from steadfast.world.runtime import Outcome, World

_COMMON = "common"  # name of the state that belongs to no single hook
# Methods in which a hook may end the run. All ranks call them after the same step.
_DECIDING = ("on_start", "on_step", "on_validation", "on_checkpoint")
_REASON_BYTES = 256


class Hooks:
    """Hooks of a worker process, which live as long as its model.

    Attributes:
        ended_early: why a hook has ended the run, "" if none has; the same on all ranks.
    """

    def __init__(self, configs: Sequence[HookConfig], device: torch.device) -> None:
        self.ended_early = ""
        self._hooks: dict[str, Any] = {}
        self._device = device
        self._state: dict[str, Tensors] = {}  # checkpointed tensors, by hook
        self._run: HookContext | None = None
        self._world: World | None = None
        self._validated: dict[str, int] = {}  # step of the last validation that each hook has seen, -1 if unknown
        for index, config in enumerate(configs):
            hook = _build(config, f"hooks.{index}")
            own = type(hook).__name__
            # A hook is named by its class rather than by its index, so that its state is found after another hook was
            # inserted before it.
            number = 1 + sum(own == each.rstrip("0123456789") for each in self._hooks)
            # A class may be called like the second hook of another.
            while (name := own if number == 1 else f"{own}{number}") in (*self._hooks, _COMMON):
                number += 1
            self._hooks[name] = hook
            self._validated[name] = -1
        deciding = [method for method in _DECIDING if any(_has_own(hook, method) for hook in self._hooks.values())]
        # A restored decision is agreed on at the start.
        self._deciding = {"on_start", *deciding} if deciding else set()

    @property
    def acts_on_steps(self) -> bool:
        """Return whether a hook of the user's own has a method `on_step`."""
        return any(_has_own(hook, "on_step") for hook in self._hooks.values())

    def setup(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Give model and optimizer to every hook, in the first call only."""
        if self._run is None:
            self._run = HookContext(model, optimizer)
            self._call("setup")

    def state_dict(self) -> Tensors:
        """Return the current state, always in the same tensors."""
        # Before the first attempt begins, the tensors may hold a restored state that no hook has loaded.
        if self._world is None and self._state:
            return self._state
        for name, hook in self._hooks.items():
            if hasattr(hook, "state_dict") and (current := hook.state_dict()):
                self._take(self._state.setdefault(name, {}), current, name)
        if self._deciding:
            self._take(self._state.setdefault(_COMMON, {}), self._common(), _COMMON)
        return self._state

    def _common(self) -> dict[str, Any]:
        """Return the hooks' decision to end the run, and the validations that they have seen."""
        step, num_steps, reason = -1, -1, b""
        if self._run is not None and self._run.ended_early:
            step, num_steps, reason = self._run.step, self._run.num_steps, self._run.ended_early.encode()
        # Other hooks have no state that would say what they have seen.
        seen = {name: self._validated[name] for name, hook in self._hooks.items() if hasattr(hook, "state_dict")}
        text = torch.tensor([*reason[:_REASON_BYTES].ljust(_REASON_BYTES, b"\0")], dtype=torch.uint8)
        return {"step": step, "num_steps": num_steps, "reason": text.to(self._device), "validated": seen}

    def begin(self, step: int, num_steps: int, world: World, draw: Draw) -> None:
        """Begin an attempt after `step` from the tensors of `state_dict`. A collective."""
        assert self._run is not None
        world.progress.enter("hooks")
        former, self._world, self.ended_early = self._run, world, ""
        self._run = HookContext(
            former.model, former.optimizer, step, num_steps, world.rank, world.size, world.attempt, _draw=draw
        )
        for name, hook in self._hooks.items():
            if hasattr(hook, "load_state_dict"):
                hook.load_state_dict(_like(hook.state_dict(), self._state.get(name, {})))
        if _COMMON in self._state:
            common = _like(self._common(), self._state[_COMMON])
            self._validated |= common["validated"]
            # Another length continues a run that has ended early, so it makes the decision void.
            if (common["step"], common["num_steps"]) == (step, num_steps):
                self._run.ended_early = bytes(common["reason"].tolist()).rstrip(b"\0").decode(errors="ignore")
        # The ranks may have lost a peer before they agreed, and the restored state may be that of another rank.
        if former.ended_early and former.step == step:
            self._run.ended_early = former.ended_early
        for name, seen in self._validated.items():
            if seen > step or step == 0:  # of steps that are done again; before the first step nothing was seen
                self._validated[name] = 0
        self._call("on_start")

    def on_step(self, step: int) -> None:
        if self._run is not None:
            self._run.step = step
        self._call("on_step")

    def on_validation(self, step: int, metrics: Mapping[str, float], recorded: bool = False) -> None:
        """Give a validation to the hooks that have not seen it. A collective.

        Args:
            recorded: whether an earlier attempt has completed the validation. Hooks whose state does not say what they
                have seen have seen it then.
        """
        assert self._run is not None
        self._run.step = step
        for name, hook in self._hooks.items():
            if self._validated[name] == step or (recorded and self._validated[name] < 0):
                continue
            if hasattr(hook, "on_validation"):
                hook.on_validation(self._run, metrics)
            self._validated[name] = step
        self._agree("on_validation")

    def on_checkpoint(self, step: int) -> None:
        assert self._run is not None
        self._run.step = step
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

    def _call(self, method: str) -> None:
        for hook in self._hooks.values():
            if hasattr(hook, method):
                getattr(hook, method)(self._run)
        self._agree(method)

    def _agree(self, method: str) -> None:
        """Agree after a method whether a hook of any rank has ended the run. A collective."""
        # The end falls on the step of the decision. By the control channel it would fall on a later one, and timing
        # would choose which.
        if method not in self._deciding or self._world is None or self._run is None or self.ended_early:
            return
        # A phase of all ranks: who waits here is ahead of a rank whose hook still runs.
        self._world.progress.enter("hooks")
        control = self._world.groups.control
        if any_rank(bool(self._run.ended_early), control):
            reasons = gather_objects(self._run.ended_early, control)
            self.ended_early = self._run.ended_early = next(filter(None, reasons))

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


def _has_own(hook: Any, method: str) -> bool:
    """Return whether a hook does something in this method that may end the run or read gradients."""
    # A class derived from `Hook` has all methods, most of which do nothing.
    own = getattr(hook, method, None)
    return type(hook) is not Ema and own is not None and getattr(own, "__func__", own) is not getattr(Hook, method)


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
