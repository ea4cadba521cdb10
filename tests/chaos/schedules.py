"""Schedules of random faults, called storms. The same seed gives the same storm to every contender."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# Shares of faults, after the 419 interruptions of Llama 3's pre-training: a faulty GPU or its memory ends a process, a
# host or a switch ends a node, software raises an exception or hangs.
MIX = {"kill worker": 0.48, "kill node": 0.24, "exception": 0.18, "hang": 0.10}


@dataclass(frozen=True)
class Strike:
    """One fault.

    Attributes:
        after_s: seconds of training before it.
    """

    after_s: float
    fault: str


@dataclass(frozen=True)
class Storm:
    """Faults by chance.

    Attributes:
        mean_s: mean time between two faults, in seconds.
        gap_s: draws the time between two faults from a generator and the mean.
        faults: share of each fault.
    """

    name: str
    mean_s: float
    gap_s: Callable[[random.Random, float], float]
    faults: dict[str, float]

    def strikes(self, seed: int) -> Iterator[Strike]:
        """Yield faults without end, in order of time."""
        chance = random.Random(seed)
        after_s = 0.0
        while True:
            after_s += self.gap_s(chance, self.mean_s)
            (fault,) = chance.choices(list(self.faults), list(self.faults.values()))
            yield Strike(after_s, fault)


def poisson(mean_s: float) -> Storm:
    """Return a storm whose faults are independent of each other."""
    return Storm(f"Poisson, mean {mean_s:g} s", mean_s, lambda chance, mean: chance.expovariate(1 / mean), MIX)


def uniform(mean_s: float) -> Storm:
    """Return a storm as Clockwork's TorchPass was measured with: 0.75 to 1.25 of the mean between two faults."""
    return Storm(f"uniform, mean {mean_s:g} s", mean_s, lambda chance, mean: mean * chance.uniform(0.75, 1.25), MIX)


def notices(mean_s: float) -> Storm:
    """Return a storm of spot instances that are taken away with notice."""
    return Storm(f"notices, mean {mean_s:g} s", mean_s, lambda chance, mean: mean, {"drain": 1.0})
