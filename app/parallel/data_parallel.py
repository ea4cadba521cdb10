"""Data parallel by torch's nn.DataParallel: one process, whose threads compute on all GPUs that it sees."""

from torch import nn

from app.config import DdpConfig
from app.errors import UsageError
from app.parallel.precision import Precision
from app.parallel.replicated import ReplicatedParallelism
from app.world.runtime import World


class DataParallelism(ReplicatedParallelism):
    """The `Parallel` of one worker with several GPUs: each microbatch is cut in parts, a part for each of them.

    Gradients are those of the whole microbatch. Statistics of BatchNorm are of a GPU's part, the running ones of the
    first GPU's; and dropout is keyed by (step, microbatch) on the first GPU only.
    """

    def __init__(self, world: World, precision: Precision) -> None:
        """Train in the only worker of a world. Raises UsageError if there are others."""
        if world.size > 1:
            raise UsageError(f"parallel.kind=data_parallel is one process, and there are {world.size}: use ddp")
        super().__init__(DdpConfig(), world, precision)
        self._device = precision.device

    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped = super().wrap(model)
        return nn.DataParallel(wrapped) if self._device.type == "cuda" else wrapped

    def unwrap(self, model: nn.Module) -> nn.Module:
        if isinstance(model, nn.DataParallel):
            module: nn.Module = model.module
            return module
        return model

    def whole(self, model: nn.Module) -> nn.Module | None:
        return self.unwrap(model)
