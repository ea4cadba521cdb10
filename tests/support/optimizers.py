"""Optimizers of the user's own, for `optimizer.target`: some resume exactly, the others must be refused."""

import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Plainest(torch.optim.Optimizer):
    """Gradient descent, to be changed in one respect by each of the classes below."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * self.direction(param, param.grad, group))

    def direction(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        return gradient


class Counting(Plainest):
    def direction(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[param]
        state["num_steps"] = state.get("num_steps", 0) + 1
        return gradient.div(state["num_steps"])


class CountingInGroups(Plainest):
    def direction(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        group["k"] = group.get("k", 0) + 1
        return gradient.div(group["k"])


class CountingByItself(Plainest):
    """A number that makes no difference in the steps of a trial."""

    calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        super().step()


class Listing(Plainest):
    def direction(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        history: list[Tensor] = self.state[param].setdefault("history", [])
        history.append(gradient.clone())
        return torch.stack(history).mean(0)


class Noisy(Plainest):
    def direction(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        return gradient + 0.1 * torch.randn_like(gradient)


class DrawingByPython(Plainest):
    def direction(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        return gradient * random.random()


class Sam(Plainest):
    """Asks for a closure as the usual implementation does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "Sharpness Aware Minimization requires closure, but it was not provided"


class Failing(Plainest):
    def direction(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        raise ValueError("no kernel\nfor it")


class OnlySingles(Plainest):
    def direction(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        assert param.dtype == torch.float32
        return gradient


class TowardsStart(Plainest):
    """Keeps where parameters began, when it meets them first."""

    def direction(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[param]
        if not state:
            state["start"] = param.clone()
        return gradient.add(param - state["start"], alpha=0.1)


class TowardsConstruction(TowardsStart):
    """Keeps what parameters held when it was built, which is before weights are read."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["start"] = param.detach().clone()


class Normalized(Plainest):
    def direction(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        return gradient.div(gradient.norm() + 1e-8)


def last_two_slower(params: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    *body, weight, bias = params
    groups: list[dict[str, Any]] = [{"params": body}, {"params": [weight, bias], "lr": lr / 10}]
    return torch.optim.NAdam(groups, lr=lr)


def exactly_five(params: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    first, *others = params
    _, _, _, _ = others
    return torch.optim.Rprop([first, *others], lr=lr)
