"""How one model is trained by many workers. Each strategy answers the same few questions; nobody asks for its kind."""

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
    """A data parallel strategy."""

    # Any survivor can give the state to a newcomer, and one rank can write it. Otherwise the lost take their shards
    # along, and every rank writes its own.
    survivors_hold_all: ClassVar[bool]
    # Cancels whatever mean the strategy takes over ranks: gradients are sums here.
    loss_scale: float
    # Parameters, gradients and the optimizer's state are in the host's memory, and on the device while they are used.
    offloads: bool

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to train, over the default process group."""
        ...

    def synchronize(self, model: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Return the context of a microbatch's forward and backward; gradients travel on the last one only."""
        ...

    def store_gradients(self) -> None:
        """Make what ranks have summed the gradients of the parameters, once it has arrived."""
        ...

    def detach_unused(self) -> None:
        """Set the `grad` of each parameter that no rank has used in the step to None. Behind the gate.

        Raises:
            TrainingError: the step is not what one process would have computed.
        """
        ...

    def clear_gradients(self, optimizer: Optimizer) -> None:
        """Forget the gradients of all parameters that the optimizer updates."""
        ...

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module with the user's own parameter names and a forward that may run without gradients."""
        ...

    def whole(self, model: nn.Module) -> nn.Module | None:
        """Return the module if this rank alone can run it, else None."""
        ...

    @staticmethod
    def units(model: nn.Module) -> list[str]:
        """Return the classes of the parts that are gathered one at a time, the model itself first; [] if none are."""
        ...

    def writes(self, world: World) -> bool:
        """Return whether this rank writes a part of a checkpoint."""
        ...


def strategy_of(config: ParallelConfig) -> type[Parallel]:
    """Return the class of the strategy that the configuration names."""
    if isinstance(config, FsdpConfig):
        # Imported only now: FSDP takes a second that a start with DDP need not wait for.
        from app.parallel.fsdp import FullyShardedDataParallelism

        return FullyShardedDataParallelism
    if isinstance(config, DataParallelConfig):
        return DataParallelism
    return TorchDistributedDataParallelism if config.reducer == "torch" else ReplicatedParallelism


def arrange(world: World, config: ParallelConfig) -> World:
    """Return `world` with its ranks on the axes that the strategy wants.

    Raises:
        UsageError: they do not make whole replicas.
    """
    shard = ranks_of_replica(config, world.size)
    if world.size % shard:
        raise UsageError(f"parallel.shard_size={shard}: {world.size} workers do not make whole replicas of so many")
    return replace(world, shard=shard)


def ranks_of_replica(config: ParallelConfig, world_size: int) -> int:
    """Return how many ranks hold one model among them."""
    if isinstance(config, FsdpConfig):
        return config.shard_size or world_size
    return 1


def build_parallel(config: ParallelConfig, world: World, precision: Precision) -> Parallel:
    """Return the strategy that the configuration names, for an arranged world."""
    if isinstance(config, FsdpConfig):
        from app.parallel.fsdp import FullyShardedDataParallelism

        return FullyShardedDataParallelism(config, world, precision)
    if isinstance(config, DataParallelConfig):
        return DataParallelism(world, precision)
    if config.reducer == "torch":
        return TorchDistributedDataParallelism(config, world, precision)
    return ReplicatedParallelism(config, world, precision)
