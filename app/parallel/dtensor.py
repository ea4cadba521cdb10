"""Tensors that are spread over ranks."""

from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this rank holds a part of a tensor alone."""
    # Not `isinstance`: DTensor's module takes a second to import.
    return hasattr(tensor, "full_tensor")


def unsharded(tensor: Tensor) -> Tensor:
    """Return all of a tensor. A collective for a DTensor."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    whole: Tensor = tensor.full_tensor()
    return whole


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
    part = held.to_local()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=held.shape, stride=held.stride())


def sharded_like(held: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's part of a tensor, as `held` has it. No collective: every rank has the whole one."""
    if not hasattr(held, "full_tensor"):
        return whole
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(held, DTensor)
    return distribute_tensor(whole.to(held.device), held.device_mesh, held.placements, src_data_rank=None)
