"""Tensors sharded over ranks, whose parts may lie in host memory.

Collectives of the mesh do not reach host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

TENSOR_AXIS = "-tensor"  # end of the name of a mesh's axis over which layers are split


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this rank holds only a part of a tensor."""
    # Not by `isinstance`, because the import of DTensor's module takes a second.
    return hasattr(tensor, "full_tensor")


def is_split(tensor: Tensor) -> bool:
    """Return whether ranks that differ on the tensor axis alone hold different parts of a tensor."""
    if not hasattr(tensor, "full_tensor"):
        return False
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    return on_tensor_axis(tensor.device_mesh) and not tensor.placements[-1].is_replicate()


def on_tensor_axis(mesh: DeviceMesh) -> bool:
    """Return whether the last axis of a mesh is the tensor axis."""
    return (mesh.mesh_dim_names or ("",))[-1].endswith(TENSOR_AXIS)


def unsharded(tensor: Tensor) -> Tensor:
    """Return the whole tensor. A collective for a DTensor."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    whole: Tensor = within_reach(tensor).full_tensor()  # type: ignore[attr-defined]
    return whole


def norms_of_parts(norms: Tensor, like: Sequence[Tensor]) -> Tensor:
    """Return the norms of DTensors as an unsummed DTensor.

    Args:
        norms: norms of this rank's parts, one per DTensor.
        like: the DTensors, all sharded alike.
    """
    from torch.distributed.tensor import DTensor

    # Its placements say how norms of parts combine. The norm of the smallest tensor costs least.
    of_one = torch.linalg.vector_norm(min(like, key=Tensor.numel))
    assert isinstance(of_one, DTensor)
    return within_reach(_spread(norms, of_one.device_mesh, of_one.placements, norms))


def squares_to_sum(norms: Tensor, gradients: Sequence[Tensor], tensor_rank: int) -> Tensor:
    """Return squared norms of gradients' parts, whose sums over a tensor group count each part once.

    Args:
        norms: norms of this rank's parts, one per gradient.
        tensor_rank: place of this rank on the tensor axis.
    """
    squares = norms.square()
    if tensor_rank:
        # The first rank counts what is the same on all of them.
        squares *= torch.tensor(list(map(is_split, gradients)), device=norms.device)
    return squares


def within_reach(tensor: Tensor) -> Tensor:
    """Return a DTensor whose local part is on the mesh's device.

    A part in host memory, where collectives of the mesh do not reach it, is copied.
    """
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    mesh = tensor.device_mesh
    if tensor.device.type == mesh.device_type:
        return tensor
    part = tensor.to_local().to(mesh.device_type)
    return _spread(part, mesh, tensor.placements, tensor)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or a plain tensor unchanged."""
    if not hasattr(tensor, "to_local"):
        return tensor
    part: Tensor = tensor.to_local()
    return part


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters of fully sharded modules."""
    # A forward without a backward leaves the root module gathered.
    for module in model.modules():
        if callable(reshard_module := getattr(module, "reshard", None)):
            reshard_module()


def on_mesh_of(held: Tensor, like: Tensor) -> Tensor:
    """Return a DTensor on the mesh of `like`, in the memory of `held`.

    Both meshes must cut tensors into the same number of parts.
    """
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(held, DTensor)
    assert isinstance(like, DTensor)
    mesh = like.device_mesh
    # The last axes are those of the parts; an axis before them is that of the replicas, and only one of the meshes may
    # have it.
    num = min(mesh.ndim, held.device_mesh.ndim)
    placements = (*[Replicate()] * (mesh.ndim - num), *held.placements[-num:])
    return _spread(held.to_local(), mesh, placements, held)


def sharded_like(held: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's part of a tensor, sharded as `held` is.

    Not a collective, because every rank has the whole tensor.
    """
    if not hasattr(held, "full_tensor"):
        return whole
    from torch.distributed.tensor import DTensor

    assert isinstance(held, DTensor)
    shape, offset = _box(whole.shape, held)
    part = whole[tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))]
    return _spread(part, held.device_mesh, held.placements, whole)


def with_part(like: Tensor, part: Tensor) -> Tensor:
    """Return a tensor sharded as `like` is, of which this rank holds `part`."""
    if not hasattr(like, "full_tensor"):
        return part
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    return _spread(part, like.device_mesh, like.placements, like)


def offset_of(held: Tensor) -> tuple[int, ...]:
    """Return the first indices of this rank's part in the whole DTensor."""
    from torch.distributed.tensor import DTensor

    assert isinstance(held, DTensor)
    return _box(held.shape, held)[1]


def _box(shape: Sequence[int], held: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and first indices of this rank's part, sharded as `held`."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(tuple(shape), held.device_mesh, held.placements)


def _spread(part: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], whole: Tensor) -> DTensor:
    """Return a DTensor shaped like `whole` of which this rank holds `part`."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # Not by `from_local`, which would copy a part in host memory to the device.
    described = TensorMeta(whole.shape, whole.stride(), part.dtype)
    return DTensor(part, DTensorSpec(mesh, tuple(placements), tensor_meta=described), requires_grad=False)
