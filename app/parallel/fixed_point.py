"""Sums of gradients that come out the same to the last bit, in whichever order they are added."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

_BITS = 62  # of an int64, with room for the sign and for the rounding of each term
_HEADROOM_BITS = 16  # a gradient may grow so many times two from one step to the next
_LEAST_MAGNITUDE = -80  # so that units, and what they are multiplied by, stay normal numbers in fp32
_FLAGS = 3  # integers behind those of a sum: how many terms were not zero, too large, not finite
# Elements that are converted at a time: they and their copies stay in the cache of a core.
_CHUNK = {"cpu": 1 << 17, "cuda": 1 << 24}


class FixedPoint:
    """The fixed-point format in which gradients are added up, which adapts to them: a part of the run's state.

    A term, the gradient of one forward, is rounded to whole units of 2^u, and integers are added, which no order
    changes. All terms of a step have one unit. It follows from the largest element of the gradients before, which
    every rank knows, and from the size of the global batch; never from the world. This is the pre-rounding of Demmel
    and Nguyen, "Parallel Reproducible Summation" (IEEE Transactions on Computers 64-7, 2015), with a single bin, and
    with a bound that is known ahead in place of a maximum over all ranks.

    Error. With n terms, where |x| < 2^m for each element x of the gradients before, u = m + 16 + ceil(log2 n) - 62. A
    sum is off by at most n / 2 units before it is rounded to the gradients' format, so by less than

        n * 2^(m + 16 + ceil(log2 n) - 63),      2^(m - 37) for n = 32.

    An element of 2^(m + 16) or more does not fit: the step then updates nothing, on all ranks alike, and the next one
    has room for it. m falls by at most one in a step, so a batch of which hardly anything counts costs nothing.

    Args:
        num_terms: the most forwards that add to a step's gradient.
        device: of the gradients.
    """

    scale = 1.0  # losses are not multiplied

    def __init__(self, num_terms: int, device: torch.device) -> None:
        self._bits = _BITS - math.ceil(math.log2(max(num_terms, 2)))  # of a term
        # A gradient of a mean loss has no element above 2^16 at its start, mostly. If it has, a few steps adapt to it.
        self._magnitude = torch.zeros((), dtype=torch.int64, device=device)
        self._chunk = _CHUNK.get(device.type, _CHUNK["cpu"])
        self._scratch: Tensor | None = None  # for integers of a chunk
        # () float64, units to one in this step; None before its first term. The host never asks for it: in the
        # midst of a backward it would wait for the device.
        self._scale: Tensor | None = None
        self._largest = torch.zeros((), dtype=torch.float64, device=device)  # element of the step's gradient
        self._num_terms = torch.zeros((), dtype=torch.int64, device=device)  # of all ranks, in all buckets, but zeros
        self._num_too_large = torch.zeros((), dtype=torch.int64, device=device)  # of all ranks

    def begin(self) -> None:
        """Forget what is known of the step under way."""
        self._scale = None
        self._largest.zero_()
        self._num_terms.zero_()
        self._num_too_large.zero_()

    def empty(self, gradient: Tensor) -> Tensor:
        """Return what terms like `gradient`, (elements,), are added up in, (elements + flags,) int64."""
        return gradient.new_empty(len(gradient) + _FLAGS, dtype=torch.int64)

    def add(self, total: Tensor, gradient: Tensor, first: bool) -> None:
        """Add a term, (elements,), to `total`, and set the term to zero. What `first` finds in `total` is forgotten."""
        if self._scale is None:
            self._scale = _power_of_two(self._bits - _HEADROOM_BITS - self._magnitude)
        scale = self._scale  # multiplying by it rounds nothing
        if self._scratch is None:
            self._scratch = torch.empty(self._chunk, dtype=torch.int64, device=gradient.device)
        peaks: list[Tensor] = []
        for into, part in self._pieces(total, gradient):
            peaks.append(_largest(part))
            part.mul_(scale).round_()
            if first:
                into.copy_(part)
            else:
                into.add_(self._scratch[: len(part)].copy_(part))
            part.zero_()
        largest = torch.stack(peaks).max()
        is_finite = largest.isfinite()
        flags = torch.stack([largest > 0, is_finite & (largest * scale >= 2.0**self._bits), ~is_finite])
        if first:
            total[-_FLAGS:].copy_(flags)
        else:
            total[-_FLAGS:].add_(flags)

    def store(self, total: Tensor, gradient: Tensor) -> None:
        """Write a sum over all ranks as a gradient: not a number where a term was not finite, or too large."""
        assert self._scale is not None
        num_terms, num_too_large, num_not_finite = total[-_FLAGS:].unbind()
        factor = torch.where(num_too_large + num_not_finite > 0, math.nan, 1.0 / self._scale)
        peaks = [self._largest]
        for into, part in self._pieces(total, gradient):
            part.copy_(into).mul_(factor)
            peaks.append(_largest(part))
        self._largest = torch.stack(peaks).max()
        self._num_terms = self._num_terms + num_terms
        self._num_too_large = self._num_too_large + num_too_large

    def _pieces(self, total: Tensor, gradient: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        return zip(total[:-_FLAGS].split(self._chunk), gradient.split(self._chunk), strict=True)

    def begin_anew(self) -> None:
        """Go back to the initial unit."""
        self._magnitude.zero_()
        self.begin()

    def overflowed(self, grad_norm: Tensor) -> bool:
        """Return whether a term of the step did not fit. Behind the gate."""
        return bool(self._num_too_large > 0)

    def after_overflow(self) -> None:
        """Make room for larger elements."""
        self._magnitude.add_(_HEADROOM_BITS)
        self.begin()

    def after_update(self) -> None:
        """Have the unit follow the gradient that has just been added up."""
        # Neither zeros nor what is not finite tells of the next one. A sum of zero whose terms were not is small.
        if bool(self._num_terms > 0) and bool(self._largest.isfinite()):
            exponent = torch.frexp(self._largest).exponent.where(self._largest > 0, _LEAST_MAGNITUDE)
            self._magnitude.copy_(torch.maximum(exponent, self._magnitude - 1).clamp_(min=_LEAST_MAGNITUDE))
        self.begin()

    def state_dict(self) -> dict[str, Tensor]:
        """Return live references to what a checkpoint must hold."""
        return {"magnitude": self._magnitude}


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent, () int64 -> () float64, exactly: no device's own function promises that."""
    return ((exponent + 1023) << 52).view(torch.float64)


def _largest(numbers: Tensor) -> Tensor:
    """Return the largest magnitude, () float64; nan where one is. Ten times as fast as a norm."""
    least, most = torch.aminmax(numbers)
    return torch.maximum(-least, most).double()
