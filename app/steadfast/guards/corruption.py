"""Choose microbatches to compute twice and identify the faulty rank.

All functions are pure. On sound machines of one kind a microbatch has the same gradient, bit for bit, on every rank.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from steadfast.data.order import keyed_hash
from steadfast.plan import Microbatch, Plan

NO_RANK = -1  # of all ranks none can be trusted, and none is known to be wrong
_CHOICE = 19  # key that separates these draws from the other draws of the seed


class Check(NamedTuple):
    """Microbatch that two ranks compute in the same step."""

    microbatch: Microbatch
    # The rank that the plan assigns the microbatch to, as the rank's first one. So the check changes no order of sums.
    owner: int
    second: int
    third: int | None  # computes the microbatch too if the two ranks differ; None if no other rank is of this kind

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return all ranks of the check: owner, second and third, if any."""
        if self.third is None:
            return self.owner, self.second
        return self.owner, self.second, self.third


# Returns the check of a step, None if the step has none.
Choice = Callable[[int], Check | None]


def choose(plan: Plan, every: int, seed: int, kinds: Sequence[str], step: int) -> Check | None:
    """Return the check of a step, None if the step has none.

    All ranks, and all attempts with the same world, choose the same check. Each rank with work is equally likely to be
    checked, whatever its share.

    Args:
        every: number of steps from one check to the next.
        kinds: kind of hardware of each rank. Only ranks of one kind are compared, because kinds round differently.
    """
    if step % every or step in plan.skip:
        return None
    alike = Counter(kinds)
    owners = []
    for rank, kind in enumerate(kinds):
        # A rank without work has a pad alone; the last step of a run may be too short to give each rank its share.
        has_work = plan.microbatches(step, rank)[0].weight > 0
        if has_work and alike[kind] > 1:
            owners.append(rank)
    if not owners:
        return None
    owner = owners[keyed_hash(_CHOICE, seed, step, 0) % len(owners)]
    others = [rank for rank, kind in enumerate(kinds) if kind == kinds[owner] and rank != owner]
    second = others.pop(keyed_hash(_CHOICE, seed, step, 1) % len(others))
    third = others[keyed_hash(_CHOICE, seed, step, 2) % len(others)] if others else None
    return Check(plan.microbatches(step, owner)[0], owner, second, third)


def differ(check: Check, digests: Sequence[int]) -> bool:
    """Return whether owner and second computed different gradients.

    Args:
        digests: digest of each rank's gradient.
    """
    return digests[check.owner] != digests[check.second]


def odd_one_out(check: Check, digests: Sequence[int], again: Sequence[int]) -> int | None:
    """Return the rank that computed wrongly, None if undecidable.

    Args:
        digests: digest of each rank; owner and second differ.
        again: digests of the repetition, by the third rank if the check has one, else by owner and second.
    """
    if check.third is not None:
        witness = again[check.third]
        if witness == digests[check.owner]:
            return check.second
        if witness == digests[check.second]:
            return check.owner
        return None
    # With two ranks, a rank whose repetition differs is the faulty one: its fault was transient. If both differ, the
    # microbatch itself is not deterministic. If none differs, the fault is permanent, and either rank may have it.
    unsteady = [rank for rank in check.ranks if again[rank] != digests[rank]]
    return unsteady[0] if len(unsteady) == 1 else None


class Corrupted(Exception):
    """Signal that one rank computed wrongly and must be replaced.

    The exception ends the attempt on every rank, but not the run.

    Attributes:
        rank: the rank that computed wrongly; with `NO_RANK` all ranks go back to a checkpoint.
        witness: the first rank whose state can be trusted.
    """

    def __init__(self, rank: int, witness: int, cause: str) -> None:
        # The base class gets all arguments, because pickle builds an exception again from these.
        super().__init__(rank, witness, cause)
        self.rank = rank
        self.witness = witness
        self.cause = cause

    def __str__(self) -> str:
        return self.cause
