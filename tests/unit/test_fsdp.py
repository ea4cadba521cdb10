"""FSDP in one process: the formats of what is gathered and summed, and state that is kept in the host's memory.

For the latter the device is made up: tensors that know where they would be, and have no numbers. No collective may
take a tensor of the host, because a communicator of the device cannot reach it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import steadfast.parallel.deferred
import steadfast.parallel.fsdp
from steadfast.checkpoint.restore import broadcast
from steadfast.checkpoint.state import NamedOptimizer, flatten
from steadfast.config import FsdpConfig, PrecisionConfig
from steadfast.loop.worker_state import WorkerState
from steadfast.optim.optimizer import rescale_gradients
from steadfast.parallel import Parallel, arrange, build_parallel
from steadfast.parallel.deferred import allocate
from steadfast.parallel.dtensor import local, norms_of_parts, on_mesh_of, sharded_like, unsharded
from steadfast.parallel.precision import Precision, build_precision
from steadfast.plan import Amendments
from steadfast.world.communicator import GlooCommunicator
from steadfast.world.groups import Groups
from steadfast.world.runtime import World
from tests.support.small import small

CPU = HOST = torch.device("cpu")
GPU = torch.device("cuda:0")


class Collectives(TorchDispatchMode):
    """Notes where the tensors of collectives are. No kernel takes tensors of the host and of the device together."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[torch.device] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        devices = [leaf.device for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        assert len(set(devices)) <= 1, func
        if func.namespace == "_c10d_functional" and "wait" not in func.__name__:
            self.seen += devices
        return func(*args, **(kwargs or {}))


class OneDevice(TorchFunctionMode):
    """Has "cuda" be the first device, which only torch with CUDA knows by itself."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to and args[1:2] == ("cuda",):
            args = (args[0], GPU)
        return func(*args, **(kwargs or {}))


class Carrier:
    """The `Communicator` of the device; notes where what it carries is."""

    abort_leaves_garbage: ClassVar[bool] = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.under_way: list[dist.Work] = []
        self.seen: list[torch.device] = []

    def sum(self, tensor: Tensor) -> None:
        self.seen.append(tensor.device)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self.seen.append(tensor.device)

    def wait(self) -> None: ...
    def synchronize(self) -> None: ...
    def abort(self) -> None: ...


def groups_of(ranks: dist.ProcessGroup, device: torch.device) -> Groups:
    return Groups(ranks, Carrier(ranks), FakeStore(), {}, threading.Event(), device=device)


@pytest.fixture
def ranks() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()


@pytest.fixture
def mesh(ranks: dist.ProcessGroup) -> Iterator[DeviceMesh]:
    mesh = DeviceMesh.from_group(ranks, "cuda", mesh_dim_names=("shards",))
    # Autograd would ask for the device's streams.
    with FakeTensorMode(allow_non_fake_inputs=True), OneDevice(), torch.no_grad():
        yield mesh


def sharded(mesh: DeviceMesh, offloads: bool = True) -> nn.Module:
    """Return a model as fsdp has it, of which each of two ranks has a half."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    for module in model:
        for name, param in module.named_parameters():
            shard = DTensor.from_local(param.chunk(2)[0], mesh, [Shard(0)], run_check=False)
            setattr(module, name, nn.Parameter(shard))
    allocate(model, GPU, offloads=offloads)
    return model


def test_shards_are_kept_on_the_host_and_gathered_on_the_device_where_buffers_are(mesh: DeviceMesh) -> None:
    model = sharded(mesh)
    assert {local(param).device for param in model.parameters()} == {HOST}
    assert {buffer.device for buffer in model.buffers()} == {GPU}
    assert {local(param).device for param in sharded(mesh, offloads=False).parameters()} == {GPU}
    with Collectives() as collectives:
        whole = unsharded(next(model.parameters()))
    assert set(collectives.seen) == {GPU}
    assert whole.shape == (4, 3)


def test_the_norm_is_summed_on_the_device_and_the_update_is_made_on_the_host(mesh: DeviceMesh) -> None:
    model = sharded(mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    with Collectives() as collectives:
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        norm, norms = rescale_gradients(
            model, Precision(GPU), torch.ones((), device=GPU), max_norm=0.5, whole_norms=norms_of_parts
        )
        assert len(collectives.seen) == 1  # all that is left of a step is one number for each parameter
        unsharded(norms)
        assert collectives.seen == [GPU, GPU]
        optimizer.step()
        state = NamedOptimizer(model, optimizer).state_dict()
    assert collectives.seen == [GPU, GPU]
    assert norm.device == GPU
    assert norms.shape == (4,)
    assert {local(param.grad).device for param in model.parameters() if param.grad is not None} == {HOST}
    assert {local(tensor).device for tensor in flatten(state).values()} == {HOST}


def test_weights_from_a_file_and_shards_of_the_last_world_stay_on_the_host(ranks: dist.ProcessGroup) -> None:
    last, mesh = (DeviceMesh.from_group(ranks, kind, mesh_dim_names=(kind,)) for kind in ("cpu", "cuda"))
    held = DTensor.from_local(torch.rand(2, 3), last, [Shard(0)])
    with torch.device("meta"):
        like = DTensor.from_local(torch.empty(2, 3), mesh, [Shard(0)], run_check=False)
    moved = on_mesh_of(held, like)
    assert isinstance(moved, DTensor)
    assert moved.device_mesh is mesh
    assert local(moved).data_ptr() == local(held).data_ptr()
    whole = torch.rand(4, 3)
    moved.copy_(sharded_like(moved, whole))
    assert torch.equal(local(moved), whole[:2])


@pytest.mark.parametrize(("device", "pins"), [(HOST, False), (GPU, True)])
def test_fsdp_is_told_to_offload(
    monkeypatch: pytest.MonkeyPatch, ranks: dist.ProcessGroup, device: torch.device, pins: bool
) -> None:
    policies: list[OffloadPolicy] = []

    def noted(module: nn.Module, *, offload_policy: OffloadPolicy, **named: object) -> None:
        policies.append(offload_policy)

    monkeypatch.setattr(steadfast.parallel.fsdp, "fully_shard", noted)
    for config in (FsdpConfig(cpu_offload=True), FsdpConfig()):
        world = arrange(World(0, 2, 0, groups_of(ranks, device)), config)
        build_parallel(config, world, Precision(device)).wrap(nn.Linear(2, 2))
    assert policies == [CPUOffloadPolicy(pin_memory=pins), OffloadPolicy()]


@pytest.mark.parametrize("wanted", [True, False])
def test_a_worker_gives_shards_memory_where_fsdp_looks_for_them(
    monkeypatch: pytest.MonkeyPatch, ranks: dist.ProcessGroup, wanted: bool
) -> None:
    told: list[bool] = []

    def noted(model: nn.Module, device: torch.device, kept: object, offloads: bool) -> None:
        told.append(offloads)
        allocate(model, device, offloads=offloads)

    monkeypatch.setattr(steadfast.parallel.deferred, "allocate", noted)
    config = small("nowhere", f"parallel={{kind: fsdp, cpu_offload: {wanted}}}")
    worker = WorkerState(config, HOST)
    world = arrange(World(0, 2, 0, groups_of(ranks, HOST)), config.parallel)
    worker.prepare(world, build_parallel(config.parallel, world, worker.precision))
    assert told == [wanted]


def test_newcomers_are_sent_what_is_kept_on_the_host_by_way_of_the_device(mesh: DeviceMesh) -> None:
    model = sharded(mesh)
    groups = groups_of(mesh.get_group(), GPU)
    counter = torch.tensor(3.0)  # as torch's AdamW has it, unless it is fused
    broadcast({"model": model.state_dict(), "optimizer": {"step": counter}}, 1, groups)
    assert isinstance(groups.communicator, Carrier)
    assert groups.communicator.seen == [GPU] * (len(model.state_dict()) + 1)
    assert counter.device == HOST
    assert {local(param).device for param in model.parameters()} == {HOST}


class Watched(nn.Linear):
    """Notes the format of its weight in a forward."""

    seen: torch.dtype | None = None

    def forward(self, input: Tensor) -> Tensor:
        self.seen = self.weight.dtype
        return super().forward(input)


@pytest.mark.parametrize(
    ("precision", "section", "gathered", "summed"),
    [
        ("fp32", {}, torch.float32, torch.float32),
        ("bf16", {}, torch.bfloat16, torch.float32),
        ("fp16", {}, torch.float16, torch.float32),
        ("bf16", {"reduce_dtype": "bf16"}, torch.bfloat16, torch.bfloat16),
        ("bf16", {"param_dtype": "fp32"}, torch.float32, torch.float32),
        ("fp32", {"param_dtype": "bf16", "reduce_dtype": "fp32"}, torch.bfloat16, torch.float32),
        ("fp64", {}, torch.float64, torch.float64),
    ],
)
def test_formats_follow_the_precision_unless_they_are_given(
    monkeypatch: pytest.MonkeyPatch,
    twin: Twin,
    precision: str,
    section: dict[str, str],
    gathered: torch.dtype,
    summed: torch.dtype,
) -> None:
    sums = inputs_of(monkeypatch, "reduce_scatter_single")
    numerics = build_precision(PrecisionConfig.model_validate({"kind": precision}), CPU)
    parallel = parallel_of(twin, FsdpConfig.model_validate(section), numerics)
    layer = Watched(4, 4)
    model = parallel.wrap(numerics.convert(nn.Sequential(layer)))
    with parallel.synchronize(model, last=True):
        model(torch.ones(2, 4, dtype=numerics.param_dtype)).sum().backward()
    assert layer.seen == gathered
    assert {tensor.dtype for tensor in sums} == {summed}


def inputs_of(monkeypatch: pytest.MonkeyPatch, collective: str) -> list[Tensor]:
    """Return the list to which each call of a collective appends its input."""
    seen: list[Tensor] = []
    honest = getattr(dist, collective)

    def noted(output: Tensor, input: Tensor, *args: object, **named: object) -> object:
        seen.append(input)
        return honest(output, input, *args, **named)

    monkeypatch.setattr(dist, collective, noted)
    return seen


NUM_LAYERS, NUM_MICROBATCHES = 4, 4


class Layered(nn.Module):
    """Four layers; the root unit has no parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(NUM_LAYERS))

    def blocks(self) -> list[nn.Module]:
        return [*self.layers]

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    return inputs_of(monkeypatch, "all_gather_single")


def run_step(parallel: Parallel, model: nn.Module) -> None:
    for left in reversed(range(NUM_MICROBATCHES)):
        with parallel.synchronize(model, last=left == 0):
            model(torch.ones(2, 8)).sum().backward()
    parallel.detach_unused()
    parallel.clear_gradients(torch.optim.SGD(model.parameters(), lr=0.1))


class Twin(GlooCommunicator):
    """Communicator to a peer that has the same numbers, except that it may lack room."""

    peer_lacks_room = False

    def sum(self, tensor: Tensor) -> None:
        tensor.mul_(2)
        tensor[-1] += int(self.peer_lacks_room)


def parallel_of(twin: Twin, config: FsdpConfig, precision: Precision, forward_size: int | None = None) -> Parallel:
    groups = Groups(twin.group, twin, FakeStore(), {}, threading.Event())
    world = arrange(World(0, 2, 0, groups, amendments=Amendments(forward_size=forward_size)), config)
    return build_parallel(config, world, precision)


@pytest.fixture
def twin(ranks: dist.ProcessGroup) -> Twin:
    return Twin(ranks, threading.Event())


@pytest.mark.parametrize(
    ("section", "num_gathers"),
    [
        ({}, 2 * NUM_MICROBATCHES * NUM_LAYERS),
        ({"reshard_after_forward": True}, 2 * NUM_MICROBATCHES * NUM_LAYERS),
        ({"reshard_after_forward": False}, NUM_LAYERS),
        ({"reshard_after_forward": False, "reduce_every_microbatch": True}, NUM_LAYERS),
        ({"reshard_after_forward": False, "prefetch": 2}, NUM_LAYERS),
    ],
    ids=str,
)
def test_layers_that_stay_gathered_are_gathered_once_a_step(
    twin: Twin, gathers: list[Tensor], section: dict[str, Any], num_gathers: int
) -> None:
    parallel = parallel_of(twin, FsdpConfig.model_validate(section), Precision(CPU))
    model = parallel.wrap(Layered())
    for num_steps in (1, 2):  # the weights have changed in between
        run_step(parallel, model)
        assert len(gathers) == num_steps * num_gathers
        assert all(isinstance(param, DTensor) for param in model.parameters()), "an update needs shards"


class Gpu:
    """Stand-in for the allocator of a GPU of 10,000 bytes, whose peak before the second step says nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, peak: int) -> None:
        self.peak = 10_000
        for name, value in {
            "mem_get_info": lambda device: (10_000 - 3_000, 10_000),
            "memory_reserved": lambda device: 3_000,
            "max_memory_allocated": lambda device: self.peak,
            "reset_peak_memory_stats": lambda device: setattr(self, "peak", peak),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


GATHERED = NUM_LAYERS * 4 * (8 * 8 + 8)  # bytes of the whole model
FITS, FULL = int(10_000 - GATHERED / 0.8 - 1), int(10_000 - GATHERED / 0.8 + 1)


@pytest.mark.parametrize(
    ("peak", "forward_size", "peer_lacks_room", "num_later"),
    [
        (FITS, None, False, NUM_LAYERS),
        (FULL, None, False, 2 * NUM_MICROBATCHES * NUM_LAYERS),
        (FITS, None, True, 2 * NUM_MICROBATCHES * NUM_LAYERS),
        (FITS, 1, False, 2 * NUM_MICROBATCHES * NUM_LAYERS),  # a forward has run out of memory before
    ],
)
def test_auto_keeps_layers_gathered_from_the_third_step_on_where_all_ranks_have_room(
    monkeypatch: pytest.MonkeyPatch,
    twin: Twin,
    gathers: list[Tensor],
    peak: int,
    forward_size: int | None,
    peer_lacks_room: bool,
    num_later: int,
) -> None:
    Gpu(monkeypatch, peak)
    honest = steadfast.parallel.fsdp._Resharding.__init__

    def on_gpu(self: Any, configured: Any, world: World, device: torch.device, param_dtype: Any) -> None:
        honest(self, configured, world, GPU, param_dtype)

    monkeypatch.setattr(steadfast.parallel.fsdp._Resharding, "__init__", on_gpu)
    twin.peer_lacks_room = peer_lacks_room
    parallel = parallel_of(twin, FsdpConfig(), Precision(CPU), forward_size)
    model = parallel.wrap(Layered())
    numbers = []
    for _ in range(4):
        run_step(parallel, model)
        numbers.append(len(gathers))
        gathers.clear()
    assert numbers[:2] == 2 * [2 * NUM_MICROBATCHES * NUM_LAYERS]
    assert numbers[2:] == 2 * [num_later]
