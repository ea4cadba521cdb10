"""Strategies that train one model with many workers, behind a common interface.

No other module asks which strategy is in use.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from steadfast.config import FsdpConfig, ParallelConfig, PipelineConfig
from steadfast.data.batches import Batch
from steadfast.errors import UsageError
from steadfast.parallel.buckets import GradientBuckets
from steadfast.parallel.ddp import TorchDistributedDataParallelism
from steadfast.parallel.pipeline import PipelineParallelism
from steadfast.parallel.precision import Precision
from steadfast.parallel.replicated import ReplicatedParallelism
from steadfast.tasks import Sums
from steadfast.world.runtime import World


class Parallel(Protocol):
    """Interface of a parallel strategy."""

    survivors_hold_all: ClassVar[bool]  # see `ParallelSection`
    # Factor that cancels a mean of the strategy over ranks, because gradients are sums here.
    loss_scale: float
    # True if parameters, gradients and optimizer state are in host memory, and on the device only during their use.
    offloads: bool

    def __init__(self, config: Any, world: World, precision: Precision) -> None:
        """Prepare for an arranged world by the section of the strategy's kind."""
        ...

    @property
    def buckets(self) -> GradientBuckets | None:
        """Return the gradient buckets of the last wrapped model, None if the strategy has none."""
        ...

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to train, over the default process group."""
        ...

    def register_methods(self, model: nn.Module, names: Iterable[str]) -> None:
        """Allow a task to call these methods of the wrapped model."""
        ...

    def loss(self, task: Any, model: nn.Module, batch: Batch) -> Sums:
        """Return the task's loss of a batch, or of nothing on a rank that holds another stage."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of the last loss, which was scaled, within `synchronize`."""
        ...

    def synchronize(self, model: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Return the context of a microbatch, whose gradients are summed if `last`."""
        ...

    def train_also(self, trained: list[nn.Parameter]) -> bool:
        """Train all of these from now on, some of them frozen so far; return whether that is possible."""
        ...

    def store_gradients(self) -> None:
        """Store the sum over ranks in the parameters' gradients, after a wait."""
        ...

    def whole_norms(self, norms: Tensor, gradients: list[Tensor]) -> Tensor:
        """Return the norms of the whole model's gradients, sharded as the gradients are.

        Args:
            norms: norm of this rank's part of each gradient.
        """
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
        from steadfast.parallel.fsdp import FullyShardedDataParallelism

        return FullyShardedDataParallelism
    if isinstance(config, PipelineConfig):
        return PipelineParallelism
    if config.reducer == "torch":
        return TorchDistributedDataParallelism
    return ReplicatedParallelism


def build_parallel(config: ParallelConfig, world: World, precision: Precision) -> Parallel:
    """Return the configured strategy for an arranged world."""
    return strategy_of(config)(config, world, precision)


def arrange(world: World, config: ParallelConfig) -> World:
    """Return `world` with its ranks on the axes of the strategy.

    Raises:
        UsageError: the ranks do not make whole replicas.
    """
    layout = config.layout(world.size)
    if layout.size != world.size:
        raise UsageError(f"{config.replica_key}: {world.size} workers do not make whole replicas")
    return replace(world, replica_size=layout.replica_size, stages=layout.stages, tensor_size=layout.tensor)
