"""Estimate the memory of a worker before there is one: on tensors without data, so that any model fits."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from app.components.optimizer import build_optimizer
from app.config import Config, FsdpConfig
from app.data.batches import Batch, map_tensors
from app.models import build_model
from app.parallel.buckets import GradientBuckets
from app.parallel.precision import build_precision
from app.tasks import build_task

_META = torch.device("meta")
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Memory:
    """Bytes of one worker.

    Attributes:
        parameters: and buffers.
        gradients: of parameters that train; whole also where parameters are sharded, until they are summed.
        optimizer: its state.
        activations: of one microbatch, with whatever its forward and backward need for a moment.
        gathered: parameters of other workers' shards, where they are sharded; without the buffers that they come in.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    gathered: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.gathered


def estimate_memory(config: Config, example: Batch) -> Memory:
    """Estimate the memory of a worker that holds the whole model, for a microbatch like `example`."""
    with _META:
        model = _build(config)
    optimizer = build_optimizer(config.optimizer, model)
    trained = [param for param in model.parameters() if param.requires_grad]
    for param in trained:
        param.grad = torch.empty_like(param)
    optimizer.step()
    state = [value for values in optimizer.state.values() for value in values.values()]
    return Memory(
        parameters=_num_bytes([*model.parameters(), *model.buffers()]),
        gradients=_num_bytes(trained),
        optimizer=_num_bytes(each for each in state if isinstance(each, Tensor)),
        activations=_activations(config, example),
        gathered=0,
    )


def of_world(whole: Memory, config: Config, world_size: int) -> Memory:
    """Return the memory of one of so many workers."""
    if not isinstance(config.parallel, FsdpConfig):
        return whole
    return Memory(
        parameters=whole.parameters // world_size,
        gradients=whole.gradients,
        optimizer=whole.optimizer // world_size,
        activations=whole.activations,
        gathered=whole.parameters if world_size > 1 else 0,
    )


def _build(config: Config) -> nn.Module:
    """Build the model in the format of its parameters."""
    # Not by `Precision.convert`: tensors without data cannot be moved to a device.
    before = torch.get_default_dtype()
    torch.set_default_dtype(build_precision(config.precision, _CPU).param_dtype)
    try:
        return build_model(config.model).train()
    finally:
        torch.set_default_dtype(before)


def _activations(config: Config, example: Batch) -> int:
    # A second of imports, which whoever asks for no estimate need not wait for.
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    # Not on the meta device: it has kernels of its own for attention, which hold more.
    with FakeTensorMode() as fake:
        model = _build(config)
        # As in a run, where gradients live as long as the model.
        GradientBuckets.of(model, None)
        batch = map_tensors(fake.from_tensor, example)
        tracker = MemTracker()
        tracker.track_external(model)
        before = tracker.get_tracker_snapshot()[_CPU]["Total"]
        with tracker, build_precision(config.precision, _CPU).autocast():
            build_task(config.task).loss(model, batch).loss_sum.backward()
    return int(tracker.get_tracker_snapshot("peak")[_CPU]["Total"] - before)


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
