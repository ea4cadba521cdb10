"""Data parallel in one process with several GPUs, by nn.DataParallel."""

from torch import nn

from steadfast.config import DataParallelConfig, DdpConfig
from steadfast.errors import UsageError
from steadfast.parallel.precision import Precision
from steadfast.parallel.replicated import ReplicatedParallelism
from steadfast.world.runtime import World


class DataParallelism(ReplicatedParallelism):
    """Strategy of one worker that splits each microbatch over its GPUs.

    Gradients are those of the whole microbatch. BatchNorm computes statistics of each GPU's part, and its running
    statistics are those of the first GPU. Dropout is keyed by (step, microbatch) on the first GPU only.
    """

    def __init__(self, config: DataParallelConfig, world: World, precision: Precision) -> None:
        """Prepare for one worker. Raises UsageError for a larger world."""
        if world.size > 1:
            raise UsageError(f"parallel.kind=data_parallel is one process, and there are {world.size}: use ddp")
        super().__init__(DdpConfig(), world, precision)

    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped = super().wrap(model)
        return nn.DataParallel(wrapped) if self._precision.device.type == "cuda" else wrapped

    def unwrap(self, model: nn.Module) -> nn.Module:
        if isinstance(model, nn.DataParallel):
            module: nn.Module = model.module
            return module
        return model

    def whole(self, model: nn.Module) -> nn.Module | None:
        return self.unwrap(model)
