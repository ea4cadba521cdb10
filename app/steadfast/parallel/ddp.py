"""Data parallel by torch's DistributedDataParallel.

Every worker holds the whole model.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from steadfast.config import DdpConfig
from steadfast.errors import TrainingError
from steadfast.parallel.precision import Precision
from steadfast.parallel.strategy import Parallel
from steadfast.world.runtime import World


class _Transparent(DistributedDataParallel):
    """DistributedDataParallel that exposes the attributes of the wrapped model."""

    has_run = False  # whether forward was called since `synchronize` began

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.has_run = True
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class TorchDistributedDataParallelism(Parallel):
    """Strategy by torch's own DistributedDataParallel, for its communication hooks."""

    def __init__(self, config: DdpConfig, world: World, precision: Precision) -> None:
        super().__init__(config, world, precision)
        self._group = world.groups.communicator.group
        # The reducer divides by the number of replicas, and scaling the loss cancels that for free. A communication
        # hook that only sums would run Python code for every bucket.
        self.loss_scale = float(world.replicate)

    def wrap(self, model: nn.Module) -> nn.Module:
        # Torch demands None for a module on the CPU.
        device_ids = [self._precision.device] if self._precision.device.type == "cuda" else None
        return _Transparent(
            model,
            device_ids=device_ids,
            process_group=self._group,
            # Gradients are views of the buckets; otherwise they would be held twice and copied.
            gradient_as_bucket_view=True,
            # No broadcast of rank 0's weights: restore makes all ranks equal at a lower cost.
            init_sync=False,
            # Parameters that no rank has used in a step then stay unchanged. The buckets keep their first layout, so
            # that a restarted run sums gradients in the order of an uninterrupted one.
            find_unused_parameters=True,
            # Every rank keeps its own running statistics, as with this program's buckets; checkpoints hold the
            # leader's.
            forward_sync_buffers=False,
        )

    @contextmanager
    def synchronize(self, model: nn.Module, last: bool) -> Iterator[None]:
        assert isinstance(model, _Transparent)
        model.has_run = False
        # Without no_sync the gradients of every microbatch would be sent: the same sum at a multiple of the traffic.
        with nullcontext() if last else model.no_sync():
            yield
        # The reducer prepares its sums in the wrapper's forward, so without a call it has summed nothing.
        if not model.has_run:
            raise TrainingError(
                "parallel.reducer=torch: the task's loss calls a part or a method of the model instead of the model, "
                "and torch's reducer sums the gradients of calls of the model alone. Call the model, or use "
                "parallel.reducer=steadfast, the default"
            )

    def unwrap(self, model: nn.Module) -> nn.Module:
        assert isinstance(model, DistributedDataParallel)
        module: nn.Module = model.module
        return module
