"""A user's own optimizer, whose state begins as in a plain loop."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from steadfast.config import TargetOptimizer
from steadfast.config.target import build_target
from steadfast.errors import ConfigError, Problem

_HAS_BEGUN = "has_begun"  # key in a parameter's state


def build_own(config: TargetOptimizer, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the user's optimizer, prepared for checkpoints before its first step."""
    optimizer = build_plain(config, params)
    if not optimizer.state:  # some constructors, such as Adagrad's, create the state themselves
        _FirstSteps(optimizer, parameters_of(optimizer.param_groups))
    return optimizer


def begin_added(optimizer: torch.optim.Optimizer, new: torch.optim.Optimizer, added: Collection[Tensor]) -> None:
    """Give parameters that were added later the state with which a new optimizer begins."""
    for param in added:
        if param in new.state:
            optimizer.state.setdefault(param, new.state[param])
    if not new.state:
        _FirstSteps(optimizer, added)


def build_plain(config: TargetOptimizer, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the user's optimizer unchanged."""
    optimizer = build_target(config, "optimizer", params=list(params), lr=config.lr)
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    raise refusal(config, f"gave a {type(optimizer).__name__}, not a torch.optim.Optimizer")


def parameters_of(groups: Iterable[Mapping[str, Any]]) -> list[nn.Parameter]:
    """Return the parameters of an optimizer's groups, in order."""
    params: list[nn.Parameter] = []
    for group in groups:
        params += group["params"]
    return params


def refusal(config: TargetOptimizer, what: str) -> ConfigError:
    """Return the error for an optimizer that cannot be used."""
    return ConfigError([Problem("", "optimizer.target", f'"{config.target}" {what}')])


class _FirstSteps:
    """Lets an optimizer create each parameter's state in its first step.

    The first step of a parameter is the first one with a gradient for it.

    Checkpoints need the state's structure before that step, so `NamedOptimizer` creates the state early, as zeros. Some
    optimizers begin with other numbers (NAdam, Rprop, ASGD), which may depend on the step's learning rate. Therefore
    the zeros are discarded right before the parameter's first step, and the optimizer creates its state anew. A tensor
    in the state, which is 1 from then on, records in checkpoints whether that has happened.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, params: Iterable[Tensor]) -> None:
        self._waiting: set[Tensor] = set(params)
        self._beginning: dict[Tensor, dict[str, Any]] = {}  # states of parameters in their first step
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for param in list(self._waiting):
            if param.grad is None:
                continue
            state = optimizer.state.pop(param, {})
            # Without the key this is the step by which `NamedOptimizer` creates the structure of the state, and the
            # parameter's first real step is still to come.
            if _HAS_BEGUN in state:
                self._waiting.remove(param)
            if bool(state.get(_HAS_BEGUN, False)):
                optimizer.state[param] = state
            else:
                # The zeros are freed before the optimizer allocates its own tensors, so that memory never holds both.
                state.clear()
                self._beginning[param] = state

    def _after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for param, state in self._beginning.items():
            # The attempt's state refers to the old dictionary, so the new tensors move into that one.
            if created := optimizer.state.pop(param, {}):
                state.update(created)
                state[_HAS_BEGUN] = torch.ones((), device=param.device)
                optimizer.state[param] = state
        self._beginning.clear()
