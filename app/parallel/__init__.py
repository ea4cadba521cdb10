"""How one model is trained by many workers. Each strategy answers the same few questions; the step asks them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import nn

from app.config import Config
from app.parallel.ddp import DistributedDataParallelism
from app.precision import Precision
from app.runtime import World


class Parallel(Protocol):
    """A data parallel strategy.

    lockstep: every rank runs the same number of forwards, because a forward is a collective.
    replicated: each worker holds all of the state, so any survivor can give it to a joiner.
    loss_scale: cancels whatever mean the strategy takes over ranks; gradients are sums here.
    """

    lockstep: bool
    replicated: bool
    loss_scale: float

    def wrap(self, model: nn.Module) -> nn.Module:
        """The module to train, over the default process group."""
        ...

    def synchronize(self, model: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Around forward and backward of a microbatch; gradients travel on the last one only."""
        ...

    def plain(self, model: nn.Module) -> nn.Module:
        """The module with the user's own parameter names, and a forward that may run without gradients."""
        ...


def build_parallel(config: Config, world: World, precision: Precision) -> Parallel:
    if config.parallel.kind == "fsdp":
        from app.parallel.fsdp import FullyShardedDataParallelism  # a second of imports that DDP need not wait for

        return FullyShardedDataParallelism(world, precision)
    return DistributedDataParallelism(config.parallel, world, precision)
