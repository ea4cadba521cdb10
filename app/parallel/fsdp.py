"""Fully sharded data parallel (FSDP2): parameters, gradients and optimizer state are split over the world."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from app.precision import Precision
from app.runtime import World


class FullyShardedDataParallelism:
    lockstep = True
    replicated = False
    loss_scale = 1.0

    def __init__(self, world: World, precision: Precision) -> None:
        self._world, self._precision = world, precision

    def wrap(self, model: nn.Module) -> nn.Module:
        # DTensor caches what it derives from a mesh and knows meshes by size and names: under a name used before, a
        # worker whose rank has changed would go on with the shards, and the groups, of its former rank.
        name = f"attempt-{self._world.attempt}"
        mesh = init_device_mesh(self._precision.device.type, (self._world.size,), mesh_dim_names=(name,))
        autocast = self._precision.autocast_dtype
        policy = MixedPrecisionPolicy(param_dtype=autocast, reduce_dtype=torch.float32 if autocast else None)
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
        model.set_requires_gradient_sync(last)
        return nullcontext()

    def plain(self, model: nn.Module) -> nn.Module:
        return model


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated parts that are gathered one at a time: what the model names by `blocks()`, else none."""
    blocks = getattr(model, "blocks", None)
    return list(blocks()) if callable(blocks) else []
