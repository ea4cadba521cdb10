"""User code that raises in each phase of a step, or ends in other ways than by an exception of its own."""

from __future__ import annotations

import sys

import torch.distributed as dist
from torch import Tensor, nn

from steadfast.hooks.hook import Hook, HookContext
from steadfast.tasks import LanguageModeling, Sums
from tests.support.small import Tokens


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


class Base(BaseException): ...


class Quits(LanguageModeling):
    """Rank 1 ends in its training forward number `forward`, from 0."""

    def __init__(self, how: str, forward: int) -> None:
        self._how = how
        self._left = forward

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums:
        if model.training and dist.get_rank() == 1:
            if self._left == 0:
                self.quit()
            self._left -= 1
        return super().loss(model, batch)

    def quit(self) -> None:
        match self._how:
            case "exit":
                sys.exit("no more")
            case "interrupt":
                raise KeyboardInterrupt
            case "base":
                raise Base("no more")
            case "unprintable":
                raise Unprintable


class Bug(Exception):
    pass


def _raise(*_: object) -> None:
    raise Bug


class Raises(LanguageModeling):
    """The last rank raises in the backward of its training forward number `forward`, from 0, or in its validation."""

    def __init__(self, phase: str, forward: int) -> None:
        self._phase = phase
        self._left = forward

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums:
        sums = super().loss(model, batch)
        if dist.get_rank() != dist.get_world_size() - 1:
            return sums
        if model.training:
            if self._left == 0 and self._phase == "backward":
                sums.loss_sum.register_hook(_raise)
            self._left -= 1
        elif self._phase == "validation" and self._left < 0:  # not before the first step, where tasks are tried
            raise Bug
        return sums


class RaisingHook(Hook):
    """The last rank raises behind the update of a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, run: HookContext) -> None:
        if run.step == self._step and run.rank == run.world_size - 1:
            raise Bug


class Unreadable(Tokens):
    """One sample cannot be read."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self._index = index

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        if index == self._index:
            raise Bug
        return super().__getitem__(index)
