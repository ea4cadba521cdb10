"""Strategies that train one model with many workers, behind a common interface.

No other module asks which strategy is in use.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import ClassVar, Protocol

from torch import nn
from torch.optim import Optimizer

from app.config import DataParallelConfig, DdpConfig, FsdpConfig
from app.errors import UsageError
from app.parallel.data_parallel import DataParallelism
from app.parallel.ddp import TorchDistributedDataParallelism
from app.parallel.precision import Precision
from app.parallel.replicated import ReplicatedParallelism
from app.world.runtime import World

ParallelConfig = DdpConfig | FsdpConfig | DataParallelConfig


class Parallel(Protocol):
    """Interface of a data parallel strategy."""

    # True if any survivor can pass the state to a new worker, and one rank can write it. If False, lost workers take
    # their shards along, and every rank writes its own shards.
    survivors_hold_all: ClassVar[bool]
    # Factor that cancels a mean of the strategy over ranks, because gradients are sums here.
    loss_scale: float
    # True if parameters, gradients and optimizer state are in host memory, and on the device only during their use.
    offloads: bool

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to train, over the default process group."""
        ...

    def register_methods(self, model: nn.Module, names: Iterable[str]) -> None:
        """Allow a task to call these methods of the wrapped model."""
        ...

    def synchronize(self, model: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Return the context of a microbatch, whose gradients are summed if `last`."""
        ...

    def store_gradients(self) -> None:
        """Store the sum over ranks in the parameters' gradients, after a wait."""
        ...

    def detach_unused(self) -> None:
        """Set the gradients of unused parameters to None, after the gate.

        A parameter is unused if no rank has used it in the step.

        Raises:
            TrainingError: the step differs from that of one process.
        """
        ...

    def clear_gradients(self, optimizer: Optimizer) -> None:
        """Clear the gradients of all parameters that the optimizer updates."""
        ...

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module with the user's parameter names, for forwards without gradients."""
        ...

    def whole(self, model: nn.Module) -> nn.Module | None:
        """Return the module if this rank alone can run the module."""
        ...

    @staticmethod
    def units(model: nn.Module) -> list[str]:
        """Return the classes of separately gathered parts, the model first."""
        ...

    def writes(self, world: World) -> bool:
        """Return whether this rank writes a part of a checkpoint."""
        ...


def strategy_of(config: ParallelConfig) -> type[Parallel]:
    """Return the class of the configured strategy."""
    if isinstance(config, FsdpConfig):
        # Imported here because FSDP takes a second, which a start with DDP should not spend.
        from app.parallel.fsdp import FullyShardedDataParallelism

        return FullyShardedDataParallelism
    if isinstance(config, DataParallelConfig):
        return DataParallelism
    return TorchDistributedDataParallelism if config.reducer == "torch" else ReplicatedParallelism


def arrange(world: World, config: ParallelConfig) -> World:
    """Return `world` with its ranks on the axes of the strategy.

    Raises:
        UsageError: the ranks do not make whole replicas.
    """
    shard = ranks_of_replica(config, world.size)
    if world.size % shard:
        raise UsageError(f"parallel.shard_size={shard}: {world.size} workers do not make whole replicas")
    return replace(world, shard=shard)


def ranks_of_replica(config: ParallelConfig, world_size: int) -> int:
    """Return the number of ranks that together hold one model."""
    if isinstance(config, FsdpConfig):
        return config.shard_size or world_size
    return 1


def build_parallel(config: ParallelConfig, world: World, precision: Precision) -> Parallel:
    """Return the configured strategy for an arranged world."""
    if isinstance(config, FsdpConfig):
        from app.parallel.fsdp import FullyShardedDataParallelism

        return FullyShardedDataParallelism(config, world, precision)
    if isinstance(config, DataParallelConfig):
        return DataParallelism(world, precision)
    if config.reducer == "torch":
        return TorchDistributedDataParallelism(config, world, precision)
    return ReplicatedParallelism(config, world, precision)
