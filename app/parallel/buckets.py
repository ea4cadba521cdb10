"""Gradients in flat buffers that live as long as the model, and travel while the backward still runs."""

import weakref
from collections.abc import Callable, Iterable
from typing import Self

import torch
from torch import Tensor, nn

from app.parallel.digest import digest
from app.world.communicator import Communicator

_MIB = 1 << 20
_FIRST_BYTES = _MIB  # the first bucket is small, so that something travels soon; as in DistributedDataParallel
_CAP_MB = 25

# Launches the sum of a full bucket over all ranks, in place; a policy may put it on the wire in another format.
Reduction = Callable[[Communicator, Tensor], None]


def plain_sum(communicator: Communicator, bucket: Tensor) -> None:
    """Launch the sum of a bucket as it is."""
    communicator.sum(bucket)


class GradientBuckets:
    """The gradients of a model. Each parameter's `grad` is a view of a bucket, for ever.

    A parameter that a backward does not reach has a gradient of zero, so that all ranks agree on what it is.

    Args:
        parameters: those that require a gradient, in the order in which a forward uses them.
        cap_bytes: size at which a bucket is full.
    """

    # Buckets hold the parameters from the last to the first, as a backward reaches them. The layout follows from the
    # model alone: every attempt adds gradients up in the same order, so a resumed run repeats an undisturbed one.
    def __init__(self, parameters: Iterable[nn.Parameter], cap_bytes: int, reduction: Reduction = plain_sum) -> None:
        self._reduction = reduction
        self._communicator: Communicator | None = None
        self._bucket_of: dict[Tensor, int] = {}
        self._flats: list[Tensor] = []
        self._sizes: list[int] = []  # parameters of each bucket
        self._armed = False
        self._missing: list[int] = []  # by bucket, the parameters whose gradient is not whole yet
        self._num_launched = 0
        for members in _split(parameters, cap_bytes):
            self._add_bucket(members)

    @classmethod
    def of(cls, model: nn.Module, cap_mb: int | None) -> Self:
        """Return the buckets of a model, the same ones in every attempt."""
        buckets = _of_model.get(model)
        if not isinstance(buckets, cls):
            trained = [param for param in model.parameters() if param.requires_grad]
            buckets = _of_model[model] = cls(trained, (cap_mb or _CAP_MB) * _MIB)
        return buckets

    def begin(self, communicator: Communicator) -> None:
        """Begin an attempt over its communicator. What a broken step has left is forgotten."""
        self._communicator = communicator
        self._armed = False
        self.clear()

    def arm(self) -> None:
        """Send each bucket as soon as the backward that follows has filled it."""
        self._armed = True
        self._missing = list(self._sizes)
        self._num_launched = 0

    def finish(self) -> None:
        """Send what that backward has not filled: buckets with parameters that it did not reach."""
        while self._num_launched < len(self._flats):
            self._launch()
        self._armed = False

    def clear(self) -> None:
        """Set all gradients to zero, in place."""
        if self._flats:
            torch._foreach_zero_(self._flats)

    def digest(self) -> Tensor:
        """Return a digest of the bits of all gradients as they are now, () int64."""
        return digest(self._flats)

    def _add_bucket(self, members: list[nn.Parameter]) -> None:
        flat = members[0].new_zeros(sum(param.numel() for param in members))
        start = 0
        for param in members:
            param.grad = flat[start : start + param.numel()].view_as(param)
            start += param.numel()
            self._bucket_of[param] = len(self._flats)
            param.register_post_accumulate_grad_hook(self._accumulated)
        self._flats.append(flat)
        self._sizes.append(len(members))

    def _accumulated(self, param: Tensor) -> None:
        # Called by autograd, on its own thread on CUDA.
        if not self._armed:
            return
        bucket = self._bucket_of[param]
        self._missing[bucket] -= 1
        if self._missing[bucket] < 0:
            raise RuntimeError(
                "a parameter got a gradient twice in one backward, as under reentrant activation checkpointing: its "
                "bucket may be on its way already. Use use_reentrant=False, or parallel.reducer=torch"
            )
        # In order, because ranks match collectives by it, and need not fill buckets in the same one.
        while self._num_launched < len(self._flats) and self._missing[self._num_launched] == 0:
            self._launch()

    def _launch(self) -> None:
        assert self._communicator is not None
        self._reduction(self._communicator, self._flats[self._num_launched])
        self._num_launched += 1


_of_model: weakref.WeakKeyDictionary[nn.Module, GradientBuckets] = weakref.WeakKeyDictionary()


def _split(parameters: Iterable[nn.Parameter], cap_bytes: int) -> list[list[nn.Parameter]]:
    """Return the parameters from the last to the first in buckets of one format and device each."""
    buckets: list[list[nn.Parameter]] = []
    filled = 0
    limit = min(_FIRST_BYTES, cap_bytes)
    for param in reversed(list(parameters)):
        fits = buckets and (param.dtype, param.device) == (buckets[-1][0].dtype, buckets[-1][0].device)
        if not fits or filled >= limit:
            limit = cap_bytes if buckets else limit
            buckets.append([])
            filled = 0
        buckets[-1].append(param)
        filled += param.numel() * param.element_size()
    return buckets
