"""Tensors that are spread over ranks."""

from torch import Tensor, nn


def unsharded(tensor: Tensor) -> Tensor:
    """Return all of a tensor. A collective for a DTensor."""
    # Not `isinstance`: DTensor's module takes a second to import.
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


def sharded_like(held: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's part of a tensor, as `held` has it. No collective: every rank has the whole one."""
    if not hasattr(held, "full_tensor"):
        return whole
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(held, DTensor)
    return distribute_tensor(whole.to(held.device), held.device_mesh, held.placements, src_data_rank=None)
