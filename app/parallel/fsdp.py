"""Fully sharded data parallel (FSDP2): parameters, gradients and optimizer state are split over ranks.

Over all ranks of the world, or over `parallel.shard_size` neighbouring ones, a replica, whose gradients are then summed
over replicas (HSDP).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.optim import Optimizer

from app.config import FsdpConfig
from app.parallel.blocks import blocks_of, modules_of_classes, modules_of_size
from app.parallel.precision import Precision
from app.world.runtime import World

_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class FullyShardedDataParallelism:
    """The `Parallel` of torch's fully_shard."""

    survivors_hold_all: ClassVar[bool] = False
    rebuilds_buckets: ClassVar[bool] = False
    loss_scale = 1.0

    def __init__(self, config: FsdpConfig, world: World, precision: Precision) -> None:
        self._config = config
        self._world = world
        self._precision = precision
        self.offloads = config.cpu_offload

    def wrap(self, model: nn.Module) -> nn.Module:
        mesh = self._mesh()
        policy = self._formats()
        offload = self._offload()
        # None keeps what only the root has until its backward, which comes at once.
        reshard = None if self._config.reshard_after_forward else False
        # The inner ones first: what is left over, the embeddings and the head, becomes the root's own group.
        for unit in [*self._units(model), model]:
            fully_shard(unit, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=reshard)
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]  # in the forward's order
        for module in sharded:
            # A plain sum: the step divides once, by the global count. Gloo has no averaging reduction anyway.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        self._prefetch(sharded[1:])  # the first is the model itself
        return model

    def _mesh(self) -> DeviceMesh:
        """Return the mesh of all ranks, over groups that an abort reaches. A collective where there are replicas."""
        world, device = self._world, self._precision.device
        # DTensor caches what it derives from a mesh and knows meshes by size and names: under a name used before, a
        # worker whose rank has changed would go on with the shards, and the groups, of its former rank.
        name = f"attempt-{world.attempt}"
        if world.replicate == 1:
            return DeviceMesh.from_group(world.groups.communicator.group, device.type, mesh_dim_names=(name,))
        across, within = world.groups.split(world.shard, device)
        ranks = torch.arange(world.size).view(world.replicate, world.shard)
        names = (f"{name}-replicas", name)
        return DeviceMesh.from_group([across.group, within.group], device.type, ranks, mesh_dim_names=names)

    def _units(self, model: nn.Module) -> list[nn.Module]:
        wrap = self._config.wrap
        if wrap == "blocks":
            return blocks_of(model)
        return modules_of_size(model, wrap) if isinstance(wrap, int) else modules_of_classes(model, wrap)

    def _formats(self) -> MixedPrecisionPolicy:
        autocast = self._precision.autocast_dtype
        # Gathered in 16 bit, but added up in 32: a sum over many ranks would lose the small gradients.
        param_dtype = _FORMATS.get(self._config.param_dtype, autocast)
        reduce_dtype = _FORMATS.get(self._config.reduce_dtype, torch.float32 if autocast else None)
        return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)

    def _offload(self) -> OffloadPolicy:
        if not self.offloads:
            return OffloadPolicy()
        # From pinned memory the device reads by itself. There is none where there is no such device.
        return CPUOffloadPolicy(pin_memory=self._precision.device.type == "cuda")

    def _prefetch(self, units: Sequence[FSDPModule]) -> None:
        num = self._config.prefetch
        if num == 0:
            return
        for number, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch([*units[number + 1 : number + 1 + num]])
            unit.set_modules_to_backward_prefetch([*units[max(0, number - num) : number][::-1]])

    def synchronize(self, model: nn.Module, last: bool) -> AbstractContextManager[object]:
        assert isinstance(model, FSDPModule)
        # Microbatches before the last one keep whole gradients, at the price of a model's memory: one sum a step.
        model.set_requires_gradient_sync(last or self._config.reduce_every_microbatch)
        model.set_requires_all_reduce(last)  # over replicas, which need not run as many microbatches
        return nullcontext()

    def store_gradients(self) -> None:
        return

    def clear_gradients(self, optimizer: Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    def whole(self, model: nn.Module) -> nn.Module | None:
        return None

    @staticmethod
    def units(model: nn.Module) -> list[str]:
        kinds: list[str] = []
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # fully_shard gives a module a class that is made of FSDPModule and the module's own.
                kinds.append(type(module).__bases__[1].__name__)
        return kinds

    def writes(self, world: World) -> bool:
        return world.in_first_replica
