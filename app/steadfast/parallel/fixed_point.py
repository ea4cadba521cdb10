"""Sums of gradients with the same bits in any order."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

_BITS = 62  # of an int64, leaving room for the sign and for the rounding of each term
_HEADROOM_BITS = 16  # a gradient may grow by this power of two from one step to the next
_LEAST_MAGNITUDE = -80  # keeps units, and their reciprocals, normal numbers in fp32
_FLAGS = 3  # integers after those of a sum: number of terms that were not zero, too large, not finite
# Number of elements converted at a time, so that they and their copies stay in the cache of a core.
_CHUNK = {"cpu": 1 << 17, "cuda": 1 << 24}


class FixedPoint:
    """Fixed-point format for sums of gradients, adapted to their size.

    A term, the gradient of one forward, is rounded to integer multiples of a unit 2^u. The sum of integers does not
    depend on their order. All terms of a step have the same unit, which follows from the largest element of earlier
    gradients, known to every rank, and from the size of the global batch, but not from the world. The format is part of
    the run's state. The method is the pre-rounding of Demmel and Nguyen, "Parallel Reproducible Summation" (IEEE
    Transactions on Computers 64-7, 2015), with a single bin, and with a bound that is known in advance in place of a
    maximum over ranks.

    Error. With n terms, and |x| < 2^m for each element x of earlier gradients, u = m + 16 + ceil(log2 n) - 62. Before
    it is rounded to the gradients' dtype, a sum is off by at most n / 2 units, so by less than

        n * 2^(m + 16 + ceil(log2 n) - 63),      2^(m - 37) for n = 32.

    An element of 2^(m + 16) or more does not fit. The step then updates nothing, on all ranks, and the next step has
    room for the element.

    Args:
        num_terms: largest number of forwards that contribute to a step's gradient.
        device: of the gradients.
    """

    scale = 1.0  # losses are not multiplied

    def __init__(self, num_terms: int, device: torch.device) -> None:
        self._bits = _BITS - math.ceil(math.log2(max(num_terms, 2)))  # of a term
        # The first gradient of a mean loss rarely has an element above 2^16. If it has, a few steps adapt the unit.
        self._magnitude = torch.zeros((), dtype=torch.int64, device=device)
        self._chunk = _CHUNK.get(device.type, _CHUNK["cpu"])
        self._scratch: Tensor | None = None  # for integers of a chunk
        # () float64, units per one in this step; None before the first term. The host never reads the value, because
        # the read would wait for the device in the middle of a backward.
        self._scale: Tensor | None = None
        self._largest = torch.zeros((), dtype=torch.float64, device=device)  # element of the step's gradient
        self._num_terms = torch.zeros((), dtype=torch.int64, device=device)  # non-zero terms of all ranks and buckets
        self._num_too_large = torch.zeros((), dtype=torch.int64, device=device)  # of all ranks

    def begin(self) -> None:
        """Reset the numbers of the current step."""
        self._scale = None
        self._largest.zero_()
        self._num_terms.zero_()
        self._num_too_large.zero_()

    def empty(self, gradient: Tensor) -> Tensor:
        """Return an uninitialized sum for terms like `gradient`.

        Args:
            gradient: (elements,); the sum is (elements + flags,) int64.
        """
        return gradient.new_empty(len(gradient) + _FLAGS, dtype=torch.int64)

    def add(self, total: Tensor, gradient: Tensor, first: bool) -> None:
        """Add a term, (elements,), to `total`, and set the term to zero.

        Args:
            first: whether to overwrite `total`, whose content is then uninitialized.
        """
        if self._scale is None:
            self._scale = _power_of_two(self._bits - _HEADROOM_BITS - self._magnitude)
        scale = self._scale  # multiplying by a power of two is exact
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
        """Write a sum over all ranks as a gradient.

        The gradient is nan if a term was not finite or too large.
        """
        assert self._scale is not None
        num_terms, num_too_large, num_not_finite = total[-_FLAGS:].unbind()
        # A sum that lacks a term must not look like a gradient. NaN reaches the norm of the whole gradient, by which
        # all ranks judge the step.
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
        """Reset to the initial unit."""
        self._magnitude.zero_()
        self.begin()

    def overflowed(self, grad_norm: Tensor) -> bool:
        """Return whether a term did not fit, after the gate."""
        return bool(self._num_too_large > 0)

    def after_overflow(self) -> None:
        """Make room for larger elements."""
        self._magnitude.add_(_HEADROOM_BITS)
        self.begin()

    def after_update(self) -> None:
        """Adapt the unit to the gradient of the last step."""
        # Gradients that are zero or not finite do not predict the next one. A sum of zero with non-zero terms does: it
        # is small.
        if bool(self._num_terms > 0) and bool(self._largest.isfinite()):
            exponent = torch.frexp(self._largest).exponent.where(self._largest > 0, _LEAST_MAGNITUDE)
            # The magnitude falls by at most one per step, so a batch in which hardly anything counts does little harm.
            self._magnitude.copy_(torch.maximum(exponent, self._magnitude - 1).clamp_(min=_LEAST_MAGNITUDE))
        self.begin()

    def state_dict(self) -> dict[str, Tensor]:
        """Return live references to the checkpointed tensors."""
        return {"magnitude": self._magnitude}


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent, () int64 -> () float64."""
    # The exponent of a float64 is stored with a bias of 1023 from bit 52 on. Written so, the result is exact, which the
    # power functions of devices do not promise.
    return ((exponent + 1023) << 52).view(torch.float64)


def _largest(numbers: Tensor) -> Tensor:
    """Return the largest magnitude, () float64, or nan."""
    # This is ten times faster than a norm.
    least, most = torch.aminmax(numbers)
    return torch.maximum(-least, most).double()
