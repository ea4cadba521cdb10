"""Sums of losses and metrics over microbatches and ranks, in float64: as numbers, or so that no order changes them."""

from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

# By what the parts of a number are multiplied: whole numbers of up to 30 bits, so that 2^23 of them add up without
# rounding. They reach from 2^83 down to 2^-60, and below that a loss counts as nothing.
_UNITS = (2.0**30, 1.0, 2.0**-30, 2.0**-60)


class Summation(Protocol):
    """How numbers are split into parts, and sums of parts joined."""

    width: ClassVar[int]  # parts of a number

    @staticmethod
    def split(number: Tensor) -> Tensor:
        """Return the parts of a number, () -> (width,) float64."""
        ...

    @staticmethod
    def join(parts: Sequence[float]) -> float:
        """Return the number whose parts these are, `width` of them."""
        ...


class Plain:
    """Numbers are added as they are, and each sum is rounded."""

    width: ClassVar[int] = 1

    @staticmethod
    def split(number: Tensor) -> Tensor:
        return number.double().reshape(1)

    @staticmethod
    def join(parts: Sequence[float]) -> float:
        return parts[0]


class OrderFree:
    """Numbers are cut into whole numbers of units that are added without rounding, so every order gives one sum.

    As the accumulators of "indexed" floating-point types have it (Ahrens, Demmel and Nguyen, "Algorithms for Efficient
    Reproducible Floating Point Summation", ACM TOMS 46-3, 2020), with units that are fixed.
    """

    width: ClassVar[int] = len(_UNITS)

    @staticmethod
    def split(number: Tensor) -> Tensor:
        left = number.double()
        parts: list[Tensor] = []
        for unit in _UNITS:
            part = torch.round(left / unit)  # dividing by a power of two rounds nothing
            left = left - part * unit  # nor does this
            parts.append(part)
        return torch.stack(parts)

    @staticmethod
    def join(parts: Sequence[float]) -> float:
        # From the smallest on, always in this order.
        total = 0.0
        for part, unit in zip(reversed(parts), reversed(_UNITS), strict=True):
            total += part * unit
        return total


def summation(exact: bool) -> type[Summation]:
    """Return how an exact run adds numbers up, or another."""
    return OrderFree if exact else Plain
