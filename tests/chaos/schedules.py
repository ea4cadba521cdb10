"""Schedules of random faults, called storms. The same seed gives the same storm to every contender."""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle, pairwise, repeat

# Shares of faults, after the 419 interruptions of Llama 3's pre-training: a faulty GPU or its memory ends a process, a
# host ends a node, software raises an exception or hangs, a switch or a cable cuts a node off, and a bit flips unseen.
MIX = {"kill worker": 0.47, "kill node": 0.17, "exception": 0.16, "hang": 0.10, "partition": 0.08, "bit flip": 0.02}
NOTICE = "drain"

# Minutes at which AWS took p3 instances away, of 18 to 40 that ran at a time. From the trace that Bamboo has recorded
# and Oobleck simulates (github.com/SymbioticLab/Oobleck, tools/simulator/traces/p3-trace.csv).
_RECLAIMS = (
    *(34, 51, 53, 54, 55, 57, 59, 77, 79, 85, 87, 89, 105, 107, 140, 141, 142, 143, 164, 168, 178, 182, 192, 218, 230),
    *(235, 236, 237, 245, 261, 265, 267, 269, 283, 285, 299, 305, 338, 340, 342, 346, 348, 354, 356, 374, 382, 402),
    *(404, 406, 408, 424, 443, 449, 451, 455, 463, 467, 469, 500, 502, 504, 506, 508, 514, 527, 529, 545, 547, 549),
    *(573, 585, 587, 591, 607, 611, 613, 666, 680, 682),
)


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
        num_steps: steps to train.
        gaps_s: draws the times between two faults, in seconds.
        faults: draws the faults.
        has_notice: whether nodes are taken away with notice.
        is_calm: whether there are no faults at all.
    """

    name: str
    num_steps: int
    gaps_s: Callable[[random.Random], Iterable[float]]
    faults: Callable[[random.Random], Iterable[str]]
    has_notice: bool = False
    is_calm: bool = False

    def strikes(self, seed: int) -> Iterator[Strike]:
        """Yield faults in order of time."""
        chance = random.Random(seed)
        after_s = 0.0
        for gap_s, fault in zip(self.gaps_s(chance), self.faults(chance), strict=False):
            after_s += gap_s
            yield Strike(after_s, fault)


def calm(num_steps: int) -> Storm:
    return Storm("no faults", num_steps, lambda _: (), _mixed, is_calm=True)


def poisson(mean_s: float, num_steps: int) -> Storm:
    """Return a storm whose faults are independent of each other."""

    def gaps_s(chance: random.Random) -> Iterator[float]:
        while True:
            yield chance.expovariate(1 / mean_s)

    return Storm(f"Poisson, mean {mean_s:g} s", num_steps, gaps_s, _mixed)


def uniform(mean_s: float, num_steps: int) -> Storm:
    """Return a storm of each kind of fault in turn, 0.75 to 1.25 of the mean apart.

    Clockwork's TorchPass was measured with these gaps.
    """

    def gaps_s(chance: random.Random) -> Iterator[float]:
        while True:
            yield mean_s * chance.uniform(0.75, 1.25)

    return Storm(f"each kind in turn, mean {mean_s:g} s", num_steps, gaps_s, lambda _: cycle(MIX))


def notices(mean_s: float, num_steps: int) -> Storm:
    """Return a storm of nodes that are taken away with notice."""
    return Storm(f"notices, every {mean_s:g} s", num_steps, lambda _: repeat(mean_s), _announced, has_notice=True)


def spot_trace(mean_s: float, num_steps: int) -> Storm:
    """Return a storm of spot instances as they were taken away in a recorded trace, scaled to a mean."""
    scale = mean_s * (len(_RECLAIMS) - 1) / (_RECLAIMS[-1] - _RECLAIMS[0])

    def gaps_s(_: random.Random) -> Iterator[float]:
        for before, after in pairwise(_RECLAIMS):
            yield scale * (after - before)

    return Storm(f"spot trace, mean {mean_s:g} s", num_steps, gaps_s, _announced, has_notice=True)


def _mixed(chance: random.Random) -> Iterator[str]:
    while True:
        yield chance.choices(list(MIX), list(MIX.values()))[0]


def _announced(_: random.Random) -> Iterator[str]:
    return repeat(NOTICE)
