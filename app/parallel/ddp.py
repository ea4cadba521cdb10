"""DistributedDataParallel: every worker holds the whole model, gradients are summed bucket by bucket."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from app.config import DdpConfig
from app.precision import Precision
from app.runtime import World


class DistributedDataParallelism:
    lockstep = False
    replicated = True

    def __init__(self, config: DdpConfig, world: World, precision: Precision) -> None:
        self._config, self._device = config, precision.device
        self.loss_scale = float(world.size)  # the reducer divides by it, in C++ and overlapped; this takes it back

    def wrap(self, model: nn.Module) -> nn.Module:
        # init_sync would broadcast rank 0's weights; restore has already made all ranks equal, at less cost.
        return DistributedDataParallel(
            model,
            device_ids=[self._device] if self._device.type == "cuda" else None,
            bucket_cap_mb=self._config.bucket_cap_mb,
            gradient_as_bucket_view=True,
            init_sync=False,
        )

    def synchronize(self, model: nn.Module, last: bool) -> AbstractContextManager[object]:
        assert isinstance(model, DistributedDataParallel)
        return nullcontext() if last else model.no_sync()

    def plain(self, model: nn.Module) -> nn.Module:
        assert isinstance(model, DistributedDataParallel)
        module: nn.Module = model.module
        return module
