"""Gradients in flat buffers that live as long as the model, and travel while the backward still runs."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from app.parallel.digest import digest
from app.parallel.fixed_point import FixedPoint
from app.world.communicator import Communicator

_MIB = 1 << 20
_FIRST_BYTES = _MIB  # the first bucket is small, so that something travels soon; as in DistributedDataParallel
_CAP_MB = 25


class Reduction(Protocol):
    """How the gradients in a bucket are added up, over the forwards of a rank and over ranks."""

    takes_each: bool  # the gradient of each forward by itself, rather than what autograd has made of them all

    def begin(self) -> None:
        """Begin a step, or an attempt, with nothing in the buckets."""
        ...

    def take(self, index: int, flat: Tensor) -> None:
        """Add to the bucket's sum what a backward has left in it."""
        ...

    def launch(self, index: int, flat: Tensor, communicator: Communicator) -> None:
        """Launch the sum over ranks."""
        ...

    def store(self, flats: list[Tensor]) -> None:
        """Make the sums over ranks the gradients. They have been waited for."""
        ...


class PlainSum:
    """Gradients add up where they are, and travel as they are."""

    takes_each = False

    def begin(self) -> None:
        return

    def take(self, index: int, flat: Tensor) -> None:
        return

    def launch(self, index: int, flat: Tensor, communicator: Communicator) -> None:
        communicator.sum(flat)

    def store(self, flats: list[Tensor]) -> None:
        return


class FixedPointSum:
    """Gradients are added as integers, and travel so, in twice the bytes of fp32."""

    takes_each = True

    def __init__(self, fixed_point: FixedPoint) -> None:
        self._fixed_point = fixed_point
        self._totals: dict[int, Tensor] = {}  # by bucket
        self._begun: set[int] = set()  # those with a term of this step

    def begin(self) -> None:
        self._fixed_point.begin()
        self._begun.clear()

    def take(self, index: int, flat: Tensor) -> None:
        if index not in self._totals:
            self._totals[index] = self._fixed_point.empty(flat)
        self._fixed_point.add(self._totals[index], flat, first=index not in self._begun)
        self._begun.add(index)

    def launch(self, index: int, flat: Tensor, communicator: Communicator) -> None:
        communicator.sum(self._totals[index])

    def store(self, flats: list[Tensor]) -> None:
        for index, flat in enumerate(flats):
            self._fixed_point.store(self._totals[index], flat)


class GradientBuckets:
    """The gradients of a model. Each parameter's `grad` is a view of a bucket, for ever.

    A parameter that a backward does not reach has a gradient of zero, so that all ranks agree on what it is.

    Args:
        parameters: those that require a gradient, in the order in which a forward uses them.
        cap_bytes: size at which a bucket is full.
        reduction: adds them up.
    """

    # Buckets hold the parameters from the last to the first, as a backward reaches them. The layout follows from the
    # model alone: every attempt adds gradients up in the same order, so a resumed run repeats an undisturbed one.
    def __init__(self, parameters: Iterable[nn.Parameter], cap_bytes: int, reduction: Reduction) -> None:
        self._reduction = reduction
        self._communicator: Communicator | None = None
        self._bucket_of: dict[Tensor, int] = {}
        self._flats: list[Tensor] = []
        self._sizes: list[int] = []  # parameters of each bucket
        self._armed = False
        self._last = False  # the backward under way is the last one of the step
        self._held = False  # what backwards leave stays in the buckets
        self._missing: list[int] = []  # by bucket, the parameters whose gradient is not whole yet
        self._num_filled = 0
        for members in _split(parameters, cap_bytes):
            self._add_bucket(members)

    @classmethod
    def of(cls, model: nn.Module, cap_mb: int | None, fixed_point: FixedPoint | None = None) -> Self:
        """Return the buckets of a model, the same ones in every attempt."""
        buckets = _of_model.get(model)
        if not isinstance(buckets, cls):
            trained = [param for param in model.parameters() if param.requires_grad]
            reduction = PlainSum() if fixed_point is None else FixedPointSum(fixed_point)
            buckets = _of_model[model] = cls(trained, (cap_mb or _CAP_MB) * _MIB, reduction)
        return buckets

    def begin(self, communicator: Communicator) -> None:
        """Begin an attempt over its communicator. What a broken step has left is forgotten."""
        self._communicator = communicator
        self._armed = False
        self.clear()

    def expect(self, last: bool) -> None:
        """Take up each bucket as soon as the backward that follows has filled it, and send it if it is the `last`."""
        self._armed = (last or self._reduction.takes_each) and not self._held
        self._last = last
        self._missing = list(self._sizes)
        self._num_filled = 0

    def finish(self) -> None:
        """Take up what that backward has not filled: buckets with parameters that it did not reach."""
        while self._armed and self._num_filled < len(self._flats):
            self._filled()
        self._armed = False

    def store(self) -> None:
        """Make the sums over ranks the gradients. They have been waited for."""
        self._reduction.store(self._flats)

    def clear(self) -> None:
        """Set all gradients to zero, in place."""
        if self._flats:
            torch._foreach_zero_(self._flats)
        self._reduction.begin()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Leave the gradients of the backwards within in the buckets, where `digest` sees them."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

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
        while self._num_filled < len(self._flats) and self._missing[self._num_filled] == 0:
            self._filled()

    def _filled(self) -> None:
        flat = self._flats[self._num_filled]
        self._reduction.take(self._num_filled, flat)
        if self._last:
            assert self._communicator is not None
            self._reduction.launch(self._num_filled, flat, self._communicator)
        self._num_filled += 1


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
