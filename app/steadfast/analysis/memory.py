"""Estimate a worker's memory before any worker starts.

The estimate simulates a step on tensors without data, so a model of any size fits.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from steadfast.config import Config, DdpConfig, ParallelConfig, PipelineConfig
from steadfast.data.batches import Batch, map_tensors, tensors_of
from steadfast.errors import ConfigError, Problem
from steadfast.models import build_model
from steadfast.optim.optimizer import build_optimizer
from steadfast.parallel import arrange, build_parallel
from steadfast.parallel.activations import checkpoint_activations
from steadfast.parallel.dtensor import local
from steadfast.parallel.pipeline import Neighbours, PipelineParallelism
from steadfast.parallel.precision import build_precision
from steadfast.parallel.stages import Outline, cut, examine, set_outline
from steadfast.tasks import Sums, build_task
from steadfast.world.allocations import Allocations
from steadfast.world.communicator import Communicator, GlooCommunicator
from steadfast.world.groups import Groups
from steadfast.world.runtime import World

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Memory:
    """Bytes of one worker.

    Attributes:
        parameters: parameters and buffers; under sharding only this worker's shards.
        gradients: gradients of trained parameters, in the form that the update reads.
        optimizer: state of the optimizer.
        activations: the rest of the peak: temporary tensors of forward and backward, and under sharding the gathered
            parameters and the gradients before they are summed.
        on_host: part of the total that is in the machine's memory rather than on a GPU.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    on_host: int = 0

    @property
    def total(self) -> int:
        """Return the bytes at the peak, on GPU and host together."""
        return self.parameters + self.gradients + self.optimizer + self.activations


class Needed(NamedTuple):
    """Bytes of one worker on its device and on its host."""

    device: int
    host: int  # 0 unless parts of the state are offloaded from a GPU

    @classmethod
    def of(cls, memory: Memory) -> Self:
        """Split an estimate into device and host."""
        return cls(memory.total - memory.on_host, memory.on_host)


class Estimate:
    """Estimate of the memory of a run's workers.

    Args:
        config: the configuration of the run.
        example: a microbatch of the usual size.

    Attributes:
        whole: the memory of a worker that holds the whole model.
    """

    def __init__(self, config: Config, example: Batch) -> None:
        self._config = config
        self._example = example
        # The gradients live as long as the model, so further microbatches add no memory.
        self.whole = self._simulate(DdpConfig(), 1, num_microbatches=1)
        self._outline: Outline | None = None

    def of_worlds(self, max_shares: Mapping[int, int], parallel: ParallelConfig) -> dict[int, Needed]:
        """Estimate the bytes of a worker for each world size.

        Args:
            max_shares: for each world size, the largest number of microbatches that one worker runs in a step.
            parallel: the parallel strategy.
        """
        if parallel.survivors_hold_all:
            return dict.fromkeys(max_shares, Needed.of(self.whole))
        found: dict[int, Needed] = {}
        if parallel.has_stages:
            for size, max_share in max_shares.items():
                most = max(stage["memory_bytes"] for stage in self.stages(size, max_share))
                found[size] = Needed(most, 0)
            return found
        kinds: dict[tuple[bool, bool, int], dict[int, int]] = {}  # world size -> workers of a replica
        for size, max_share in max_shares.items():
            layout = parallel.layout(size)
            # Worlds of one kind differ in their number of shards only. With several microbatches a worker holds
            # unsharded gradients until the last one; with a single microbatch it does not. A world of one worker
            # gathers nothing.
            kinds.setdefault((size > 1, max_share > 1, layout.tensor), {})[size] = layout.replica_size
        for (_, accumulates, _), replicas in kinds.items():
            ends: dict[int, Needed] = {}
            # Two simulations are enough, because the worlds between them are interpolated.
            for ranks in {min(replicas.values()), max(replicas.values())}:
                ends[ranks] = Needed.of(self._simulate(parallel, ranks, num_microbatches=1 + accumulates))
            for size, ranks in replicas.items():
                found[size] = _between(ends, ranks)
        return found

    @property
    def hidden_bytes(self) -> int:
        """Return the bytes that a stage sends to the next one for a microbatch, 0 without stages."""
        return self._outline.hidden.nbytes if self._outline else 0

    def stages(self, world_size: int, max_share: int) -> list[dict[str, int]]:
        """Estimate each stage of a replica that runs `max_share` microbatches in a step, [] without stages."""
        config = self._config.parallel
        found: list[dict[str, int]] = []
        if not isinstance(config, PipelineConfig):
            return found
        if self._outline is None:
            self._outline = self._examine()
        layout = config.layout(world_size)
        for stage, (start, stop) in enumerate(cut(len(self._outline.blocks), layout.stages, config.balance)):
            # A stage keeps the activations of as many microbatches as there are stages from it on.
            kept = layout.stages - stage if config.schedule == "1f1b" else max_share
            first = stage * layout.tensor
            memory = self._simulate(config, layout.replica_size, min(kept, max_share), first)
            found.append({"layers": stop - start, "memory_bytes": memory.total})
        return found

    def _examine(self) -> Outline:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        model, task = self._build_without_data(fake), build_task(self._config.task)
        batch = map_tensors(fake.from_tensor, self._example)
        precision = build_precision(self._config.precision, _CPU)

        def run() -> Sums:
            with precision.autocast():
                return task.loss(model, batch)

        with fake:
            return examine(model, run, _CPU)

    def _simulate(self, strategy: ParallelConfig, world_size: int, num_microbatches: int, rank: int = 0) -> Memory:
        """Return the peak memory of a worker by simulating its second step.

        The simulation ends after the backward of that step. By then the optimizer has created its state.

        Args:
            strategy: the parallel strategy to simulate.
            world_size: the number of ranks to simulate. Only `rank` runs.
            num_microbatches: of the worker in a step. Without stages a third one changes nothing.
        """
        # DTensor finds the shapes of results by tensors of its own, which count too, and remembers the shapes.
        if strategy.has_tensor_parts:
            self._simulate_once(strategy, world_size, num_microbatches, rank)
        return self._simulate_once(strategy, world_size, num_microbatches, rank)

    def _simulate_once(self, strategy: ParallelConfig, world_size: int, num_microbatches: int, rank: int) -> Memory:
        precision = build_precision(self._config.precision, _CPU)
        task = build_task(self._config.task)
        # The simulation uses the CPU, because the attention kernels of the meta device hold more memory.
        fake = FakeTensorMode(allow_non_fake_inputs=strategy.has_stages)
        with _fake_world(rank, world_size, strategy) as world:
            parallel = build_parallel(strategy, world, precision)
            model = self._build_without_data(fake)
            batch = map_tensors(fake.from_tensor, self._example)
            allocations = Allocations()
            allocations.add([*model.parameters(), *model.buffers(), *tensors_of(batch)])
            with allocations:
                # `fake` is off here, because device meshes and optimizers read values of tensors. The model's own
                # tensors still have no data.
                if isinstance(parallel, PipelineParallelism):
                    assert self._outline is not None
                    set_outline(model, self._outline)
                    parallel.neighbours = partial(_FakeNeighbours, self._outline)
                model = parallel.wrap(model)
                optimizer = build_optimizer(self._config.optimizer, model)
                trained = [param for param in model.parameters() if param.requires_grad]
                _create_state(optimizer, trained)
                parallel.clear_gradients(optimizer)
                for left in reversed(range(num_microbatches)):
                    with fake, parallel.synchronize(model, last=left == 0):
                        with precision.autocast():
                            loss_sum = parallel.loss(task, model, batch).loss_sum
                        parallel.backward(loss_sum)
                        del loss_sum
            state: list[Tensor] = []
            for values in optimizer.state.values():
                # An optimizer may also keep plain numbers, such as a count of steps.
                state += [value for value in values.values() if isinstance(value, Tensor)]
            parameters = _num_bytes([*model.parameters(), *model.buffers()])
            gradients = _num_bytes(trained)
            held = _num_bytes(state)
            on_host = 0
            if parallel.offloads:
                on_host = gradients + held + _num_bytes(model.parameters())
        rest = allocations.peak_bytes - parameters - gradients - held
        if self._config.run.exact:
            # An exact run adds up gradients in integers of 8 bytes. The simulation has no values to convert, so they
            # are added here.
            gradients += 8 * sum(param.numel() for param in trained)
        return Memory(parameters, gradients, held, rest, on_host)

    def _build_without_data(self, fake: FakeTensorMode) -> nn.Module:
        # Some models cannot be built this way: `Module.to` raises, and a deep copy belongs to another mode. peft does
        # both.
        with suppress(Exception), fake:
            model = self._build()
            tensors = [*model.parameters(), *model.buffers()]
            if all(getattr(tensor, "fake_mode", None) is fake for tensor in tensors):
                return model
        try:
            model = self._build()
        except (RuntimeError, MemoryError) as error:  # torch raises RuntimeError when the CPU runs out of memory
            first_line = str(error).partition("\n")[0]
            raise ConfigError([Problem("", "model", f"cannot be built on this machine: {first_line}")]) from error
        for module in model.modules():
            for name, param in module.named_parameters(recurse=False):
                setattr(module, name, fake.from_tensor(param))
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, fake.from_tensor(buffer))
        return model

    def _build(self) -> nn.Module:
        """Build the model with its parameters in the configured dtype."""
        # `Precision.convert` also moves a model to a device, which fails for tensors without data.
        before = torch.get_default_dtype()
        torch.set_default_dtype(build_precision(self._config.precision, _CPU).param_dtype)
        try:
            model = build_model(self._config.model).train()
        finally:
            torch.set_default_dtype(before)
        checkpoint_activations(model, self._config.memory.activation_checkpointing)
        return model


def _between(ends: Mapping[int, Needed], size: int) -> Needed:
    """Interpolate the bytes for a replica of `size` ranks between two simulated sizes.

    The interpolation is linear in 1 / size.
    """
    # The result may be slightly too large, and is never too small: the peak is the largest of many sums, each of a
    # constant and a share of the model.
    if size in ends:
        return ends[size]
    first, last = sorted(ends)
    weight = (1 / size - 1 / last) / (1 / first - 1 / last)
    return Needed(*(round(end + weight * (begin - end)) for begin, end in zip(ends[first], ends[last], strict=True)))


def _create_state(optimizer: torch.optim.Optimizer, trained: list[nn.Parameter]) -> None:
    """Make the optimizer create its state by an update with zero gradients."""
    for param in trained:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    optimizer.step()


@contextmanager
def _fake_world(rank: int, size: int, strategy: ParallelConfig) -> Iterator[World]:
    """Form a world as one rank, with collectives that send nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        group = dist.group.WORLD
        assert group is not None
        aborted = threading.Event()
        groups = _FakeGroups(group, GlooCommunicator(group, aborted), FakeStore(), {}, aborted)
        yield arrange(World(rank, size, 0, groups), strategy)
    finally:
        dist.destroy_process_group()


class _FakeGroups(Groups):
    """Groups that send nothing."""

    def add_axis(self, lines: Iterable[Sequence[int]]) -> list[Communicator]:
        mine: list[Communicator] = []
        for line in lines:
            if dist.get_rank() in line:
                mine.append(GlooCommunicator(dist.new_group(list(line), backend="fake"), self.aborted))
        return mine


class _FakeNeighbours(Neighbours):
    """Neighbours that receive tensors without data."""

    def __init__(self, outline: Outline, world: World) -> None:
        super().__init__(world)
        self._hidden = outline.hidden

    def send_forward(self, hidden: Tensor, more: bool) -> None:
        return

    def receive_forward(self, device: torch.device, more: bool) -> Tensor:
        return torch.empty_like(self._hidden, device=device)


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)
