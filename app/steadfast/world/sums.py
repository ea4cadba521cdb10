"""Sums of losses and metrics over microbatches and ranks, in float64."""

from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

# Units of the parts of a number. A part is an integer of up to 30 bits, so that 2^23 parts add up without rounding.
# Together the parts reach from 2^83 down to 2^-60; a smaller loss counts as 0.
_UNITS = (2.0**30, 1.0, 2.0**-30, 2.0**-60)


class Summation(Protocol):
    """Way of joining the sums of the parts of numbers."""

    width: ClassVar[int]  # number of parts of a number

    @staticmethod
    def join(parts: Sequence[float]) -> float:
        """Return the number with these `width` parts."""
        ...


class Plain:
    """Adds numbers unchanged, so that each sum is rounded."""

    width: ClassVar[int] = 1

    @staticmethod
    def join(parts: Sequence[float]) -> float:
        return parts[0]


class OrderFree:
    """Splits numbers into integers, whose sum is the same in every order.

    The integers count fixed units and are added without rounding, as in the accumulators of "indexed" floating-point
    types (Ahrens, Demmel and Nguyen, "Algorithms for Efficient Reproducible Floating Point Summation", ACM TOMS 46-3,
    2020).
    """

    width: ClassVar[int] = len(_UNITS)

    @staticmethod
    def split(number: Tensor) -> Tensor:
        """Return the parts of a number, () -> (width,) float64."""
        left = number.double()
        parts: list[Tensor] = []
        for unit in _UNITS:
            part = torch.round(left / unit)  # dividing by a power of two is exact
            left = left - part * unit  # exact as well
            parts.append(part)
        return torch.stack(parts)

    @staticmethod
    def join(parts: Sequence[float]) -> float:
        # Always from the smallest part on, because this sum rounds.
        total = 0.0
        for part, unit in zip(reversed(parts), reversed(_UNITS), strict=True):
            total += part * unit
        return total
