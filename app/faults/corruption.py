"""Which microbatch of a step is computed twice, by whom, and which rank has computed wrongly where the two differ.

All of it is pure. On sound machines of one kind a microbatch has one gradient, to the bit, whoever computes it.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from app.data.order import keyed_hash
from app.plan import Microbatch, Plan

_CHOICE = 19  # keeps these draws apart from all others of the seed


class Check(NamedTuple):
    """A microbatch that two ranks compute in the same step."""

    microbatch: Microbatch
    # The one that computes it anyway, as its first: so no sum of the step is taken in another order than without it.
    owner: int
    second: int
    third: int | None  # computes it too where the two differ; None if there is nobody else

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return all who may have to compute the microbatch."""
        return (self.owner, self.second) if self.third is None else (self.owner, self.second, self.third)


def choose(plan: Plan, every: int, seed: int, kinds: Sequence[str], step: int) -> Check | None:
    """Return the check of a step, None if it has none. All ranks, and all attempts of one world, choose alike.

    Each rank with work is as likely as any other to be checked, whatever its share.

    Args:
        every: one step in so many is checked.
        kinds: of each rank's hardware. Only ranks of one kind are compared, as others round otherwise.
    """
    if step % every or step in plan.skip:
        return None
    shares = plan.shares_at(step)
    num_microbatches = plan.num_microbatches_in(step)
    alike = Counter(kinds)
    owners = []
    for rank, (share, stop) in enumerate(zip(shares, accumulate(shares), strict=True)):
        # A step that the end of the run has cut short does not fill all shares.
        has_work = share > 0 and stop - share < num_microbatches
        if has_work and alike[kinds[rank]] > 1:
            owners.append(rank)
    if not owners:
        return None
    owner = owners[keyed_hash(_CHOICE, seed, step, 0) % len(owners)]
    others = [rank for rank, kind in enumerate(kinds) if kind == kinds[owner] and rank != owner]
    second = others.pop(keyed_hash(_CHOICE, seed, step, 1) % len(others))
    third = others[keyed_hash(_CHOICE, seed, step, 2) % len(others)] if others else None
    return Check(plan.microbatches(step, owner)[0], owner, second, third)


def differ(check: Check, digests: Sequence[int]) -> bool:
    """Return whether owner and second have come to another gradient each. `digests` are those of all ranks."""
    return digests[check.owner] != digests[check.second]


def odd_one_out(check: Check, digests: Sequence[int], again: Sequence[int]) -> int | None:
    """Return the rank that has computed wrongly, None if that cannot be told.

    Args:
        digests: of all ranks, which differ between owner and second.
        again: what followed: the third's where there is one, else another one of both.
    """
    if check.third is not None:
        witness = again[check.third]
        if witness == digests[check.owner]:
            return check.second
        return check.owner if witness == digests[check.second] else None
    # Of two, one that does not come to the same twice is the odd one: what struck it has passed.
    unsteady = [rank for rank in check.ranks if again[rank] != digests[rank]]
    return unsteady[0] if len(unsteady) == 1 else None


class Corrupted(Exception):
    """Ends the attempt on every rank alike, not the run: one rank has computed wrongly, and is to be replaced.

    Attributes:
        rank: the one that has.
        witness: the first rank whose state can be trusted.
    """

    def __init__(self, rank: int, witness: int, cause: str) -> None:
        super().__init__(rank, witness, cause)
        self.rank = rank
        self.witness = witness
        self.cause = cause

    def __str__(self) -> str:
        return self.cause
