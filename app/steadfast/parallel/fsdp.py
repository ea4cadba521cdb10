"""Fully sharded data parallel (FSDP2): parameters, gradients and optimizer state are sharded.

The shards are spread over all ranks of the world, or over `parallel.shard_size` neighbouring ranks, a replica, whose
gradients are then summed over replicas (HSDP). With `parallel.tensor_size` the layers of a plan are split before: each
rank shards its part with the ranks that have the same part.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from steadfast.config import FsdpConfig
from steadfast.errors import TrainingError
from steadfast.parallel.blocks import blocks_of, modules_of_classes, modules_of_size
from steadfast.parallel.buckets import weak_hook
from steadfast.parallel.dtensor import (
    TENSOR_AXIS,
    is_sharded,
    local,
    norms_of_parts,
    on_tensor_axis,
    squares_to_sum,
)
from steadfast.parallel.precision import Precision
from steadfast.parallel.strategy import Parallel
from steadfast.world.communicator import Communicator
from steadfast.world.runtime import Axis, World

_PRIME = 1_000_003  # modulus of the hash of an order of units; a sum over a million ranks can hold its square
# Share of the room beside a step's peak that the gathered model may take. The rest is for longer samples and for what a
# step does not need, such as a validation's metrics.
_USED_SHARE = 0.8
# From torch 2.15 on, all backwards of a step accumulate in the dtype of the reduction, and the attribute cannot be set.
_ONE_DTYPE = isinstance(getattr(FSDPParam, "unsharded_accumulated_grad", None), property)
_M_MMAP_THRESHOLD = -3  # in malloc.h
_MAPPED_BYTES = 2 * 2**20  # smaller memory is used again quickly, and mapping it anew would take longer
_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class FullyShardedDataParallelism(Parallel):
    """Strategy by torch's fully_shard."""

    def __init__(self, config: FsdpConfig, world: World, precision: Precision) -> None:
        super().__init__(config, world, precision)
        if precision.device.type == "cpu":
            _return_freed_units()
        self.offloads = config.cpu_offload
        self._policy = self._formats()
        self._resharding = _Resharding(config.reshard_after_forward, world, precision.device, self._policy.param_dtype)
        self._within: dict[Axis, Communicator] = {}
        self._usage: _Usage
        self._accumulates_apart: bool  # gradients of several backwards have another dtype than those of one

    def wrap(self, model: nn.Module) -> nn.Module:
        mesh = self._mesh()
        if self._world.tensor_size > 1:
            from steadfast.parallel.tensor import split_layers

            *of_shards, of_parts = mesh.mesh_dim_names or ()
            split_layers(model, self._config.plan, mesh[of_parts])
            mesh = mesh[tuple(of_shards)]
        policy = self._policy
        self._accumulates_apart = policy.reduce_dtype not in (None, policy.param_dtype)
        offload = self._offload()
        # Inner units first: the remaining parameters, of the embeddings and the head, become the root's own group.
        for unit in [*self._units(model), model]:
            # None keeps the root's own parameters until its backward, which follows at once.
            fully_shard(unit, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=None)
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]  # in the forward's order
        for module in sharded:
            # A plain sum: the step divides once, by the global count. Gloo has no averaging reduction anyway.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            # Ranks may use different parameters of a unit, and all of them must reduce the whole unit.
            module.set_reduce_scatter_unused_params(True)
        self._prefetch(sharded[1:])  # the first one is the model itself
        self._usage = _Usage(model, sharded, self._world, self._precision.device)
        return model

    def _mesh(self) -> DeviceMesh:
        """Return the mesh over abortable groups; a collective with replicas."""
        world, device = self._world, self._precision.device
        # DTensor caches results by a mesh's size and names. Under a name used before, a worker whose rank has changed
        # would continue with the shards and the groups of its former rank.
        name = f"attempt-{world.attempt}"
        if world.shard_size == world.size:
            return DeviceMesh.from_group(world.groups.communicator.group, device.type, mesh_dim_names=(name,))
        groups: list[dist.ProcessGroup] = []
        sizes: list[int] = []
        names: list[str] = []
        for axis, size, end in self._axes():
            (communicator,) = world.groups.add_axis(world.lines(axis))
            self._within[axis] = communicator
            groups.append(communicator.group)
            sizes.append(size)
            names.append(name + end)
        ranks = torch.arange(world.size).view(sizes)
        return DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=tuple(names))

    def _axes(self) -> list[tuple[Axis, int, str]]:
        """Return each axis of the mesh: name, size, and the end of its name in the mesh."""
        world = self._world
        axes: list[tuple[Axis, int, str]] = [("shard", world.shard_size, "")]
        if world.replicate > 1:
            axes.insert(0, ("replicate", world.replicate, "-replicas"))
        if world.tensor_size > 1:
            axes.append(("tensor", world.tensor_size, TENSOR_AXIS))
        return axes

    def _units(self, model: nn.Module) -> list[nn.Module]:
        wrap = self._config.wrap
        if wrap == "blocks":
            return blocks_of(model)
        if isinstance(wrap, int):
            return modules_of_size(model, wrap)
        return modules_of_classes(model, wrap)

    def _formats(self) -> MixedPrecisionPolicy:
        autocast = self._precision.autocast_dtype
        # Gathered in 16 bits but summed in 32, because a sum over many ranks would lose small gradients.
        param_dtype = _FORMATS.get(self._config.param_dtype, autocast)
        widened = torch.float32 if autocast else None
        reduce_dtype = _FORMATS.get(self._config.reduce_dtype, widened)
        return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)

    def _offload(self) -> OffloadPolicy:
        if not self.offloads:
            return OffloadPolicy()
        # The device reads pinned memory by itself. Without such a device no memory can be pinned.
        return CPUOffloadPolicy(pin_memory=self._precision.device.type == "cuda")

    def _prefetch(self, units: Sequence[FSDPModule]) -> None:
        num = self._config.prefetch
        if num == 0:
            return
        for number, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch([*units[number + 1 : number + 1 + num]])
            # A backward runs the units in the opposite order.
            unit.set_modules_to_backward_prefetch([*units[max(0, number - num) : number][::-1]])

    @contextmanager
    def synchronize(self, model: nn.Module, last: bool) -> Iterator[None]:
        assert isinstance(model, FSDPModule)
        # Microbatches before the last one keep unsharded gradients, which take a model's memory but need one sum a
        # step.
        model.set_requires_gradient_sync(last or self._config.reduce_every_microbatch)
        # The sum over replicas waits for the last microbatch, because replicas need not run as many microbatches.
        model.set_requires_all_reduce(last)
        if not self._resharding.after_forward:
            model.set_reshard_after_forward(False)
            # What the forward leaves gathered serves the next microbatch too, and the peak stays that of a forward's
            # end. After the last microbatch the weights change.
            model.set_reshard_after_backward(last)
        if last:
            self._usage.fill()
        elif self._accumulates_apart:
            self._gather_each_once(model)
        yield
        if last:
            self._usage.send(lacks_room=self._resharding.lacks_room(model))

    def register_methods(self, model: nn.Module, names: Iterable[str]) -> None:
        """Let further methods of the model gather its parameters."""
        for name in names:
            # In this order: torch wraps the noting method, so parameters are gathered before their use is recorded.
            setattr(model, name, self._usage.noting(getattr(model, name)))
            register_fsdp_forward_method(model, name)

    def _gather_each_once(self, model: nn.Module) -> None:
        """Gather and reshard each unit once, before a backward without a sum over ranks.

        A collective.
        """
        # FSDP then converts each unit's gradients, which fails for a unit that was never gathered.
        self._accumulates_apart = False
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.unshard()
                unit.reshard()

    def train_also(self, trained: list[nn.Parameter]) -> bool:
        return True

    def whole_norms(self, norms: Tensor, gradients: list[Tensor]) -> Tensor:
        if self._world.tensor_size == 1:
            return norms_of_parts(norms, gradients)
        # Gradients of split layers and of others are on different meshes, so the sums over both axes are made here.
        squares = squares_to_sum(norms, gradients, self._world.tensor)
        for axis in ("shard", "tensor"):
            self._within[axis].sum(squares)
            self._within[axis].wait()
        return squares.sqrt()

    def detach_unused(self) -> None:
        num_without_room = self._usage.detach_unused()
        self._resharding.end_step(num_without_room)

    def clear_gradients(self, optimizer: Optimizer) -> None:
        super().clear_gradients(optimizer)
        self._usage.clear()

    @staticmethod
    def units(model: nn.Module) -> list[str]:
        kinds: list[str] = []
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # The class that fully_shard gives a module derives from FSDPModule and the module's own class.
                kinds.append(type(module).__bases__[1].__name__)
        return kinds


def _return_freed_units() -> None:
    """Let the C library return the memory of freed units to the system."""
    # By default glibc raises its threshold to 32 MiB at the first frees. Units then come from the heap, where tensors
    # that live longer take parts of their memory, so that the next unit needs new memory: a step held twice its need.
    with suppress(AttributeError):  # only glibc has this setting
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


class _Resharding:
    """Policy that decides how long parameters stay gathered.

    `auto` begins with a reshard after each forward. Each rank measures the peak of the second step, because the first
    one has no optimizer state yet. If all ranks have room for the whole gathered model beside that peak, parameters
    stay gathered for a step from then on.

    Attributes:
        after_forward: whether parameters are freed after each forward now, rather than at the end of a step.
    """

    def __init__(
        self, configured: bool | Literal["auto"], world: World, device: torch.device, param_dtype: torch.dtype | None
    ) -> None:
        self.after_forward = configured is not False
        self._device = device
        self._param_dtype = param_dtype  # of gathered parameters, None for their own
        # Where a forward has run out of memory, the room of one step says little about the next one.
        has_run_out = world.amendments.forward_size is not None
        self._measures = configured == "auto" and device.type == "cuda" and not has_run_out
        self._num_steps = 0

    def lacks_room(self, model: nn.Module) -> bool:
        """Return whether the whole gathered model does not fit beside the peak of this step."""
        if not self._measures:
            return True
        # The number of elements of a DTensor is that of the whole tensor.
        needed = sum(param.numel() * (self._param_dtype or param.dtype).itemsize for param in model.parameters())
        free, _ = torch.cuda.mem_get_info(self._device)
        peak = torch.cuda.max_memory_allocated(self._device)
        # Memory that the allocator has reserved beyond the peak is free too.
        room = free + torch.cuda.memory_reserved(self._device) - peak
        return needed > _USED_SHARE * room

    def end_step(self, num_without_room: int) -> None:
        """End a step; every rank gives the same number of ranks without room."""
        if not self._measures:
            return
        self._num_steps += 1
        if self._num_steps == 1:
            # The restore of a state and the attempts before may have needed more than a step needs.
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        self._measures = False
        self.after_forward = num_without_room > 0


class _Usage:
    """Records a step's used parameters and each rank's order of units.

    For parameters that a rank has not used, units reduce gradients of zeros. One small sum over all ranks, started
    after the last backward of a step, informs every rank which parameters no rank has used.

    Args:
        units: units of the model, itself included, in the order of a forward.
        device: device of the sum.
    """

    def __init__(self, model: nn.Module, units: Sequence[FSDPModule], world: World, device: torch.device) -> None:
        self._model = model
        self._units = units
        self._world = world
        self._device = device
        self._places: dict[Tensor, int] = {}  # gathered parameter -> index among the model's parameters
        self._used: set[int] = set()  # indices of the parameters that this rank has used
        self._order = 0  # hash of the units that this rank has run
        self._seen: set[nn.Module] = set()  # units that have been gathered once
        self._sums: Tensor
        for number, unit in enumerate(units):
            assert isinstance(unit, nn.Module)
            # After the hook of fully_shard, which gathers the unit.
            unit.register_forward_pre_hook(partial(self._gathered, number))

    def clear(self) -> None:
        """Begin a step."""
        self._used.clear()
        self._order = 0

    def fill(self) -> None:
        """Accumulate zero gradients for parameters that earlier backwards did not reach.

        Earlier backwards of a step accumulate gradients in the dtype of the reduction. A parameter that only the last
        backward reaches would have a gradient in its own dtype, but the reduction of a unit needs one dtype. Units
        without accumulated gradients stay as they are.
        """
        if _ONE_DTYPE or not self._used or len(self._used) == len(self._places):
            return
        for unit in self._units:
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                if any(each.unsharded_accumulated_grad is not None for each in group.fsdp_params):
                    for each in group.fsdp_params:
                        if each.unsharded_accumulated_grad is None and each.unsharded_param.requires_grad:
                            zeros = torch.zeros_like(each.unsharded_param, dtype=each.reduce_dtype)
                            each.unsharded_accumulated_grad = zeros

    def send(self, lacks_room: bool) -> None:
        """Start to sum usage flags, orders of units and `lacks_room` over all ranks.

        Call this method after the last backward of a step.
        """
        numbers = [0] * (len(list(self._model.parameters())) + 2 * self._world.replicate)
        for place in self._used:
            numbers[place] = 1
        # Behind the flags each replica has two numbers, to which only its own ranks add: the sum of their hashes, and
        # that of the squares. `detach_unused` compares both.
        replica = self._world.rank // self._world.replica_size
        stop = len(numbers) - 2 * (self._world.replicate - replica - 1)
        numbers[stop - 2 : stop] = self._order, self._order**2
        numbers.append(int(lacks_room))
        self._sums = torch.tensor(numbers).to(self._device, non_blocking=True)  # the host need not wait for the device
        self._world.groups.communicator.sum(self._sums)

    def detach_unused(self) -> int:
        """Remove the gradients of parameters that no rank has used.

        Returns the number of ranks that lack room.

        Raises:
            TrainingError: ranks of one replica have run different units, or the task calls an undeclared method.
        """
        params = list(self._model.parameters())
        *numbers, num_without_room = self._sums.tolist()
        orders = numbers[len(params) :]
        for order, square in zip(orders[::2], orders[1::2], strict=True):
            # By the inequality of Cauchy and Schwarz both sides are equal if and only if all hashes are equal.
            if self._world.replica_size * square != order**2:
                raise TrainingError(
                    "parallel.kind=fsdp: the ranks did not run the same layers in one step, and a layer that is "
                    "sharded by itself is gathered by all ranks at once. Every forward has to run each of them; name "
                    "larger ones in parallel.wrap or in the model's blocks(), or take parallel.kind=ddp"
                )
        seen = {*self._places.values()}
        for place, (param, num_ranks) in enumerate(zip(params, numbers, strict=False)):
            if num_ranks:
                continue
            if place not in seen and param.grad is not None and bool(local(param.grad).any()):
                raise TrainingError(
                    "parallel.kind=fsdp: the task calls the model by a method beside forward. Name the method in an "
                    'attribute of the task, model_methods = ["..."]'
                )
            param.grad = None
        return int(num_without_room)

    def noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that also records its use of parameters."""

        def noted(*args: Any, **named: Any) -> Any:
            self._gathered(0, self._model, args)
            return method(*args, **named)

        return noted

    def _gathered(self, number: int, unit: nn.Module, inputs: Any) -> None:
        # Forwards without gradients, such as those of a validation, do not belong to a step.
        if not torch.is_grad_enabled():
            return
        self._order = (31 * self._order + number + 1) % _PRIME
        if unit in self._seen:
            return
        self._seen.add(unit)
        for place, param in enumerate(self._model.parameters()):
            can_train = param.requires_grad or param.is_floating_point()
            if can_train and param not in self._places and _is_gathered(param):
                self._places[param] = place
                # A frozen one, too, because a hook of the user may unfreeze it; torch takes none of such a parameter.
                trains = param.requires_grad
                param.requires_grad_(True).register_post_accumulate_grad_hook(weak_hook(self._accumulated))
                param.requires_grad_(trains)

    def _accumulated(self, param: Tensor) -> None:
        self._used.add(self._places[param])


def _is_gathered(param: Tensor) -> bool:
    """Return whether a rank holds all of its part of a layer, rather than a shard of the part."""
    if not is_sharded(param):
        return True
    assert isinstance(param, DTensor)
    # A gathered part of a split layer is on the tensor axis alone.
    return param.device_mesh.ndim == 1 and on_tensor_axis(param.device_mesh)
