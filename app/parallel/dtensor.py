"""Tensors that are spread over ranks. Each rank may keep its part in the host's memory, beyond reach of the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this rank holds a part of a tensor alone."""
    # Not `isinstance`: DTensor's module takes a second to import.
    return hasattr(tensor, "full_tensor")


def unsharded(tensor: Tensor) -> Tensor:
    """Return all of a tensor. A collective for a DTensor."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    whole: Tensor = within_reach(tensor).full_tensor()  # type: ignore[attr-defined]
    return whole


def norms_of_parts(norms: Tensor, like: Tensor) -> Tensor:
    """Return the norms of DTensors, of whose parts this rank has `norms`, as a DTensor that nothing is summed for yet.

    Args:
        like: one of the DTensors, all of which are spread alike.
    """
    from torch.distributed.tensor import DTensor

    of_one = torch.linalg.vector_norm(like)  # only says how norms of parts become those of the whole
    assert isinstance(of_one, DTensor)
    return within_reach(_spread(norms, of_one.device_mesh, of_one.placements, norms))


def within_reach(tensor: Tensor) -> Tensor:
    """Return a DTensor that collectives of its mesh reach: a copy on the device where it is kept on the host."""
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    mesh = tensor.device_mesh
    if tensor.device.type == mesh.device_type:
        return tensor
    part = tensor.to_local().to(mesh.device_type)
    return _spread(part, mesh, tensor.placements, tensor)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: all of it unless it is a DTensor."""
    if not hasattr(tensor, "to_local"):
        return tensor
    part: Tensor = tensor.to_local()
    return part


def reshard(model: nn.Module) -> None:
    """Have modules of fully_shard hold their shards alone: a forward without a backward leaves the root gathered."""
    for module in model.modules():
        if callable(reshard_module := getattr(module, "reshard", None)):
            reshard_module()


def on_mesh_of(held: Tensor, like: Tensor) -> Tensor:
    """Return a DTensor over the same memory as `held`, on the mesh of `like`, which cuts tensors into as many parts."""
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(held, DTensor)
    assert isinstance(like, DTensor)
    mesh = like.device_mesh
    # The last axis is that of the parts; one before it is that of the replicas.
    placements = (*[Replicate()] * (mesh.ndim - 1), held.placements[-1])
    return _spread(held.to_local(), mesh, placements, held)


def sharded_like(held: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's part of a tensor, as `held` has it. No collective: every rank has the whole one."""
    if not hasattr(held, "full_tensor"):
        return whole
    from torch.distributed.tensor import DTensor

    assert isinstance(held, DTensor)
    shape, offset = _box(whole.shape, held)
    part = whole[tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))]
    return _spread(part, held.device_mesh, held.placements, whole)


def offset_of(held: Tensor) -> tuple[int, ...]:
    """Return where this rank's part of a DTensor begins in all of it."""
    from torch.distributed.tensor import DTensor

    assert isinstance(held, DTensor)
    return _box(held.shape, held)[1]


def _box(shape: Sequence[int], held: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and the first indices of this rank's part of a tensor of `shape` that is cut as `held` is."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(tuple(shape), held.device_mesh, held.placements)


def _spread(part: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], whole: Tensor) -> DTensor:
    """Return a DTensor of the shape of `whole`, of which this rank has `part`, where that is."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # Not by `from_local`, which brings a part that is kept on the host to the device.
    described = TensorMeta(whole.shape, whole.stride(), part.dtype)
    return DTensor(part, DTensorSpec(mesh, tuple(placements), tensor_meta=described), requires_grad=False)
