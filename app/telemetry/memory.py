"""Estimate the memory of a worker before there is one: a step on tensors without data, so that any model fits."""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from app.components.optimizer import build_optimizer
from app.config import Config, DdpConfig, FsdpConfig
from app.data.batches import Batch, map_tensors, tensors_of
from app.errors import ConfigError, Problem
from app.models import build_model
from app.parallel import ParallelConfig, arrange, build_parallel, ranks_of_replica
from app.parallel.activations import checkpoint_activations
from app.parallel.dtensor import local
from app.parallel.precision import build_precision
from app.tasks import build_task
from app.world.allocations import Allocations
from app.world.communicator import GlooCommunicator
from app.world.groups import Groups
from app.world.runtime import World

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Memory:
    """Bytes of one worker.

    Attributes:
        parameters: and buffers; this worker's shards, where they are sharded.
        gradients: of parameters that train, as the update sees them.
        optimizer: its state.
        activations: the rest of the peak: what forward and backward need for a moment, and under sharding what is
            gathered, and gradients before they are summed.
        on_host: how much of all this is in the machine's memory rather than on a GPU.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    on_host: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


def memory_of_whole(config: Config, example: Batch) -> Memory:
    """Estimate the memory of a worker that holds the whole model, for microbatches like `example`."""
    # Its gradients live as long as the model, so further microbatches add nothing.
    return _simulate(config, DdpConfig(), example, 1, accumulates=False)


class Needed(NamedTuple):
    """Bytes of one worker, by where they are."""

    device: int
    host: int  # beside a GPU

    @classmethod
    def of(cls, memory: Memory) -> Self:
        return cls(memory.total - memory.on_host, memory.on_host)


def bytes_of_worlds(config: Config, example: Batch, whole: Memory, max_shares: Mapping[int, int]) -> dict[int, Needed]:
    """Estimate the bytes of a worker, by the size of its world.

    Args:
        whole: of a worker that holds the whole model.
        max_shares: for each size, the most microbatches that one of the workers runs in a step.
    """
    if not isinstance(config.parallel, FsdpConfig):
        return dict.fromkeys(max_shares, Needed.of(whole))
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for size, max_share in sorted(max_shares.items()):
        # Several microbatches add up whole gradients, and one alone needs none. A world of one gathers nothing.
        kinds.setdefault((size > 1, max_share > 1), []).append(size)
    found: dict[int, Needed] = {}
    for (_, accumulates), sizes in kinds.items():
        sharing = {size: ranks_of_replica(config.parallel, size) for size in sizes}
        ends: dict[int, Needed] = {}
        for ranks in {sharing[sizes[0]], sharing[sizes[-1]]}:
            ends[ranks] = Needed.of(_simulate(config, config.parallel, example, ranks, accumulates))
        for size, ranks in sharing.items():
            found[size] = _between(ends, ranks)
    return found


def _between(ends: Mapping[int, Needed], size: int) -> Needed:
    """Return the bytes of a replica between two others: on a line over 1 / size, of which they are the ends."""
    # At most a little too much: the peak is the largest of many sums of a constant and a share of the model.
    if size in ends:
        return ends[size]
    first, last = sorted(ends)
    weight = (1 / size - 1 / last) / (1 / first - 1 / last)
    on_line = [round(end + weight * (begin - end)) for begin, end in zip(ends[first], ends[last], strict=True)]
    return Needed(*on_line)


def _simulate(config: Config, strategy: ParallelConfig, example: Batch, world_size: int, accumulates: bool) -> Memory:
    """Do what a worker does to the end of its second step's backward, and return what it holds at most.

    Args:
        accumulates: whether a step has more than one microbatch of this worker. A third one changes nothing.
    """
    precision = build_precision(config.precision, _CPU)
    task = build_task(config.task)
    # On the CPU, not on the meta device: that has kernels of its own for attention, which hold more.
    fake = FakeTensorMode()
    with _fake_world(world_size, strategy) as world:
        parallel = build_parallel(strategy, world, precision)
        model = _build_without_data(config, fake)
        batch = map_tensors(fake.from_tensor, example)
        allocations = Allocations()
        allocations.add([*model.parameters(), *model.buffers(), *tensors_of(batch)])
        with allocations:
            # Meshes, and what an optimizer reads from the device, are not without data. What they make of a model is.
            model = parallel.wrap(model)
            optimizer = build_optimizer(config.optimizer, model)
            trained = [param for param in model.parameters() if param.requires_grad]
            _create_state(optimizer, trained)
            parallel.clear_gradients(optimizer)
            for last in (False, True) if accumulates else (True,):
                with fake, parallel.synchronize(model, last):
                    with precision.autocast():
                        loss_sum = task.loss(model, batch).loss_sum
                    precision.backward(loss_sum)
                    del loss_sum
        state = [value for values in optimizer.state.values() for value in values.values()]
        parameters = _num_bytes([*model.parameters(), *model.buffers()])
        gradients = _num_bytes(trained)
        held = _num_bytes(each for each in state if isinstance(each, Tensor))
        on_host = gradients + held + _num_bytes(model.parameters()) if parallel.offloads else 0
    rest = allocations.peak_bytes - parameters - gradients - held
    # Which an exact run adds gradients up in. The simulation knows no numbers, and so does without.
    integers = 8 * sum(param.numel() for param in trained) if config.run.exact else 0
    return Memory(parameters, gradients + integers, held, rest, on_host)


def _create_state(optimizer: torch.optim.Optimizer, trained: list[nn.Parameter]) -> None:
    """Have the optimizer create its state, by an update from gradients of zero."""
    for param in trained:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    optimizer.step()


def _build_without_data(config: Config, fake: FakeTensorMode) -> nn.Module:
    # Not every code can: `Module.to` raises, and a deep copy is of another mode. peft does both.
    with suppress(Exception), fake:
        model = _build(config)
        tensors = [*model.parameters(), *model.buffers()]
        if all(getattr(tensor, "fake_mode", None) is fake for tensor in tensors):
            return model
    try:
        model = _build(config)
    except (RuntimeError, MemoryError) as error:  # torch has a RuntimeError for memory of the CPU
        first_line = str(error).partition("\n")[0]
        raise ConfigError([Problem("", "model", f"cannot be built on this machine: {first_line}")]) from error
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            setattr(module, name, fake.from_tensor(param))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, fake.from_tensor(buffer))
    return model


def _build(config: Config) -> nn.Module:
    """Build the model in the format of its parameters."""
    # Not by `Precision.convert`: tensors without data cannot be moved to a device.
    before = torch.get_default_dtype()
    torch.set_default_dtype(build_precision(config.precision, _CPU).param_dtype)
    try:
        model = build_model(config.model).train()
    finally:
        torch.set_default_dtype(before)
    checkpoint_activations(model, config.memory.activation_checkpointing)
    return model


@contextmanager
def _fake_world(size: int, strategy: ParallelConfig) -> Iterator[World]:
    """Form a world whose collectives send nothing, as its first rank sees it."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        group = dist.group.WORLD
        assert group is not None
        aborted = threading.Event()
        groups = Groups(group, GlooCommunicator(group, aborted), FakeStore(), {}, aborted)
        yield arrange(World(0, size, 0, groups), strategy)
    finally:
        dist.destroy_process_group()


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)
