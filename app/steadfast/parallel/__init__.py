"""Strategies that train one model with many workers, behind a common interface.

No other module asks which strategy is in use.
"""

from dataclasses import replace

from steadfast.config import FsdpConfig, ParallelConfig, PipelineConfig
from steadfast.errors import UsageError
from steadfast.parallel.ddp import TorchDistributedDataParallelism
from steadfast.parallel.pipeline import PipelineParallelism
from steadfast.parallel.precision import Precision
from steadfast.parallel.replicated import ReplicatedParallelism
from steadfast.parallel.strategy import Parallel as Parallel
from steadfast.world.runtime import World


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
