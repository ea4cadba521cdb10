"""Fully sharded data parallel (FSDP2): parameters, gradients and optimizer state are split over the world."""

from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

from app.parallel.blocks import blocks_of
from app.parallel.precision import Precision
from app.world.runtime import World


class FullyShardedDataParallelism:
    """The `Parallel` of torch's fully_shard."""

    equal_forwards: ClassVar[bool] = True
    survivors_hold_all: ClassVar[bool] = False
    rebuilds_buckets: ClassVar[bool] = False
    loss_scale = 1.0

    def __init__(self, world: World, precision: Precision) -> None:
        self._world = world
        self._precision = precision

    def wrap(self, model: nn.Module) -> nn.Module:
        # DTensor caches what it derives from a mesh and knows meshes by size and names: under a name used before, a
        # worker whose rank has changed would go on with the shards, and the groups, of its former rank.
        name = f"attempt-{self._world.attempt}"
        group = self._world.groups.communicator.group  # which an abort reaches
        mesh = DeviceMesh.from_group(group, self._precision.device.type, mesh_dim_names=(name,))
        autocast = self._precision.autocast_dtype
        # Gathered in 16 bit, but added up in 32: a sum over many ranks would lose the small gradients.
        policy = MixedPrecisionPolicy(param_dtype=autocast, reduce_dtype=torch.float32 if autocast else None)
        # Blocks first: what is left over, the embeddings and the head, becomes the root's own group.
        for block in blocks_of(model):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # A plain sum: the step divides once, by the global count. Gloo has no averaging reduction anyway.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return model

    def synchronize(self, model: nn.Module, last: bool) -> AbstractContextManager[object]:
        assert isinstance(model, FSDPModule)
        # Microbatches before the last one keep whole gradients, at the price of a model's memory: one sum a step.
        model.set_requires_gradient_sync(last)
        return nullcontext()

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
        return True
