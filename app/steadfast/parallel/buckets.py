"""Flat buffers for gradients, summed over ranks while the backward runs."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from steadfast.parallel.digest import digest
from steadfast.parallel.dtensor import local, with_part
from steadfast.parallel.fixed_point import FixedPoint
from steadfast.world.communicator import Communicator

# As in DistributedDataParallel, the first bucket is small, so that its sum starts early in the backward.
_FIRST_BYTES = 2**20
_CAP_BYTES = 25 * 2**20


@dataclass(eq=False)
class Bucket:
    """Flat buffer with the gradients and flags of some parameters, of which this rank may hold parts.

    A flag is 1 if this rank has used the parameter in the step, else 0. Flags are summed with the gradients, so that
    every rank knows which parameters no rank has used.
    """

    params: list[nn.Parameter]
    flat: Tensor  # (elements + parameters,)
    unused: list[int] = field(default_factory=list)  # indices of the parameters that this rank has not used in the step

    @classmethod
    def of(cls, params: list[nn.Parameter]) -> Self:
        """Return a bucket whose parameters' gradients are views of it.

        The parameters share one dtype and device.
        """
        num_elements = sum(local(param).numel() for param in params)
        bucket = cls(params, local(params[0]).new_zeros(num_elements + len(params)))
        bucket.attach(range(len(params)))
        return bucket

    @property
    def gradient(self) -> Tensor:
        """Return the elements of all gradients, (elements,)."""
        return self.flat[: -len(self.params)]

    @property
    def used(self) -> Tensor:
        """Return the flags, (parameters,)."""
        return self.flat[-len(self.params) :]

    def attach(self, places: Sequence[int]) -> None:
        """Make the gradients of the parameters at `places` views of the bucket."""
        if places:
            views = self.gradient.split([local(param).numel() for param in self.params])
            for place in places:
                param = self.params[place]
                param.grad = with_part(param, views[place].view_as(local(param)))

    def detach_unused(self) -> None:
        """Set `grad` to None for parameters that no rank has used.

        The flags must have been summed over ranks.
        """
        # Flags of parameters that this rank has used need not be read.
        if self.unused:
            used = self.used.tolist()
            for place in self.unused:
                if not used[place]:
                    self.params[place].grad = None


class Reduction(Protocol):
    """Way of summing the gradients in a bucket over forwards and ranks."""

    takes_each: bool  # needs the gradient of each forward separately, not their sum by autograd

    def begin(self) -> None:
        """Begin a step or an attempt with empty buckets."""
        ...

    def take(self, bucket: Bucket) -> None:
        """Add the gradient of a backward to the bucket's sum."""
        ...

    def launch(self, bucket: Bucket, communicator: Communicator) -> None:
        """Start to sum gradients and flags over all ranks."""
        ...

    def store(self, buckets: list[Bucket]) -> None:
        """Write the complete sums over ranks into the buckets."""
        ...


class PlainSum:
    """Sums gradients in place, in their own dtype."""

    takes_each = False

    def begin(self) -> None:
        return

    def take(self, bucket: Bucket) -> None:
        return

    def launch(self, bucket: Bucket, communicator: Communicator) -> None:
        communicator.sum(bucket.flat)

    def store(self, buckets: list[Bucket]) -> None:
        return


class FixedPointSum:
    """Sums gradients as integers, which take twice the bytes of fp32."""

    takes_each = True

    def __init__(self, fixed_point: FixedPoint) -> None:
        self._fixed_point = fixed_point
        # Sums of the fixed-point format, followed by the flags; those of former buckets are freed.
        self._totals: weakref.WeakKeyDictionary[Bucket, Tensor] = weakref.WeakKeyDictionary()
        self._begun: weakref.WeakSet[Bucket] = weakref.WeakSet()  # buckets with a term of this step

    def begin(self) -> None:
        self._fixed_point.begin()
        self._begun.clear()

    def take(self, bucket: Bucket) -> None:
        if bucket not in self._totals:
            self._totals[bucket] = self._fixed_point.empty(bucket.flat)
        total = self._totals[bucket][: -len(bucket.params)]
        self._fixed_point.add(total, bucket.gradient, first=bucket not in self._begun)
        self._begun.add(bucket)

    def launch(self, bucket: Bucket, communicator: Communicator) -> None:
        total = self._totals[bucket]
        # The flags travel behind the integers, so that a bucket needs one collective.
        total[-len(bucket.params) :].copy_(bucket.used)
        communicator.sum(total)

    def store(self, buckets: list[Bucket]) -> None:
        for bucket in buckets:
            total = self._totals[bucket]
            self._fixed_point.store(total[: -len(bucket.params)], bucket.gradient)
            bucket.used.copy_(total[-len(bucket.params) :])


class GradientBuckets:
    """Gradients of a model, which are views of buckets during a step.

    A parameter that this rank does not use in a step has a gradient of zero there, to which other ranks may add. If no
    rank uses the parameter, its `grad` is None when the optimizer steps, as in a plain loop.

    Args:
        parameters: parameters that require a gradient, in the order in which a forward uses them.
        cap_bytes: size at which a bucket is full.
        reduction: sums the gradients.
    """

    # Buckets hold the parameters from the last to the first, in the order of a backward. The layout depends on the
    # model alone: every attempt sums gradients in the same order, so a resumed run repeats an uninterrupted one.
    def __init__(self, parameters: Iterable[nn.Parameter], cap_bytes: int, reduction: Reduction) -> None:
        self._reduction = reduction
        self._communicator: Communicator | None = None
        # The key is the id of a parameter, because a tensor's own hash is slow, and a backward looks up each parameter.
        self._bucket_of: dict[int, int] = {}
        self._armed = False
        self._last = False  # the current backward is the last one of the step
        self._held = False  # gradients stay in the buckets
        self._flats: list[Tensor] = []
        self._flags: list[Tensor] = []
        self._reached: set[int] = set()  # ids of parameters that a backward of this step has reached
        self._missing: list[int] = []  # number of incomplete gradients, by bucket
        self._num_filled = 0
        self._cap_bytes = cap_bytes
        self._buckets: list[Bucket] = []
        self.lay_out(parameters)

    def lay_out(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make buckets of these parameters, the former ones among them, between two steps."""
        for bucket in self._buckets:
            for param in bucket.params:
                param.grad = None  # frees the former buckets
        self._flats, self._flags, self._buckets = [], [], []
        self._buckets = [Bucket.of(params) for params in _split(parameters, self._cap_bytes)]
        accumulated = weak_hook(self._accumulated)
        for index, bucket in enumerate(self._buckets):
            self._flats.append(bucket.flat)
            self._flags.append(bucket.used)
            for param in bucket.params:
                if id(param) not in self._bucket_of:
                    param.register_post_accumulate_grad_hook(accumulated)
                self._bucket_of[id(param)] = index
        self.clear()

    @classmethod
    def of(cls, model: nn.Module, fixed_point: FixedPoint | None = None) -> Self:
        """Return the buckets of a model, the same objects in every attempt."""
        buckets = _of_model.get(model)
        if not isinstance(buckets, cls):
            trained = [param for param in model.parameters() if param.requires_grad]
            reduction: Reduction = PlainSum()
            if fixed_point is not None:
                reduction = FixedPointSum(fixed_point)
            buckets = _of_model[model] = cls(trained, _CAP_BYTES, reduction)
        return buckets

    def begin(self, communicator: Communicator) -> None:
        """Begin an attempt over its communicator, with empty buckets."""
        self._communicator = communicator
        self._armed = False
        self.clear()

    def expect(self, last: bool) -> None:
        """Handle each bucket once a backward fills it; sum if `last`."""
        self._armed = (last or self._reduction.takes_each) and not self._held
        self._last = last
        self._missing = [len(bucket.params) for bucket in self._buckets]
        self._num_filled = 0

    def finish(self) -> None:
        """Handle the buckets with parameters that the backward did not reach."""
        while self._armed and self._num_filled < len(self._buckets):
            # Only now all backwards of the step have run, so only now a parameter is known to be unused.
            if self._last:
                self._flag_unused(self._buckets[self._num_filled])
            self._filled()
        self._armed = False

    def store(self) -> None:
        """Make the complete sums over ranks the gradients."""
        self._reduction.store(self._buckets)

    def detach_unused(self) -> None:
        """Set `grad` to None for parameters that no rank has used, until `clear`.

        Call it after `Groups.gate`, when the flags of all ranks are summed.
        """
        for bucket in self._buckets:
            bucket.detach_unused()

    def clear(self) -> None:
        """Set all gradients to zero, in place."""
        for bucket in self._buckets:
            # `detach_unused` may have removed the gradients of these parameters.
            bucket.attach(bucket.unused)
            bucket.unused = []
        self._reached.clear()
        if self._buckets:
            torch._foreach_zero_(self._flats)
            # All parameters count as used, unless `finish` finds otherwise. Most models use all of them.
            torch._foreach_add_(self._flags, 1)
        self._reduction.begin()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the gradients of backwards in the buckets, for `digest`."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def digest(self) -> Tensor:
        """Return a digest of the current bits of all gradients, () int64."""
        return digest([bucket.gradient for bucket in self._buckets])

    def _accumulated(self, param: Tensor) -> None:
        # Called by autograd, which has its own thread on CUDA.
        self._reached.add(id(param))
        if not self._armed:
            return
        bucket = self._bucket_of[id(param)]
        self._missing[bucket] -= 1
        if self._missing[bucket] < 0:
            raise RuntimeError(
                "a parameter got a gradient twice in one backward, as under reentrant activation checkpointing: its "
                "bucket may be on its way already. Use use_reentrant=False, or parallel.reducer=torch"
            )
        # In the order of the buckets, by which ranks match collectives; backwards may fill them in another order.
        while self._num_filled < len(self._buckets) and self._missing[self._num_filled] == 0:
            self._filled()

    def _filled(self) -> None:
        bucket = self._buckets[self._num_filled]
        self._reduction.take(bucket)
        if self._last:
            assert self._communicator is not None
            self._reduction.launch(bucket, self._communicator)
        self._num_filled += 1

    def _flag_unused(self, bucket: Bucket) -> None:
        """Record the bucket's parameters that no backward has reached."""
        for place, param in enumerate(bucket.params):
            if id(param) not in self._reached:
                bucket.unused.append(place)
                bucket.used[place] = 0


def weak_hook(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Return a tensor's hook that calls a method while its object exists."""
    # Garbage collection does not follow a parameter's hooks, so an object that is referred to by a hook and refers to
    # the parameter would never be freed.
    found = weakref.WeakMethod(method)

    def hook(param: Tensor) -> None:
        if call := found():
            call(param)

    return hook


_of_model: weakref.WeakKeyDictionary[nn.Module, GradientBuckets] = weakref.WeakKeyDictionary()


def _split(parameters: Iterable[nn.Parameter], cap_bytes: int) -> list[list[nn.Parameter]]:
    """Return parameters, last to first, in buckets of one dtype and device."""
    buckets: list[list[nn.Parameter]] = []
    filled = 0
    limit = min(_FIRST_BYTES, cap_bytes)
    for param in reversed(list(parameters)):
        fits = buckets and (param.dtype, param.device) == (buckets[-1][0].dtype, buckets[-1][0].device)
        if not fits or filled >= limit:
            if buckets:
                limit = cap_bytes
            buckets.append([])
            filled = 0
        buckets[-1].append(param)
        filled += local(param).nbytes
    return buckets
