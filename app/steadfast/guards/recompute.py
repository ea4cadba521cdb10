"""Compute a microbatch on two ranks and find a faulty rank."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor

from steadfast.config import RecomputeConfig, RunConfig
from steadfast.data import Fetched
from steadfast.errors import TrainingError
from steadfast.guards.corruption import Check, Choice, Corrupted, choose, differ, odd_one_out
from steadfast.parallel import Parallel
from steadfast.parallel.buckets import GradientBuckets
from steadfast.parallel.digest import digest
from steadfast.plan import Microbatch, Plan
from steadfast.run.events import Notice
from steadfast.world.control import gather_numbers, gather_objects
from steadfast.world.hardware import Hardware, read_hardware
from steadfast.world.runtime import Runtime, World

# Runs a microbatch outside of the step's sums. The call leaves a gradient in the buckets, and returns the loss sum, (),
# and the count.
Run = Callable[[Fetched], tuple[Tensor, Tensor | int]]
# Fetches a microbatch, and returns the context in which the microbatch is repeated. Only faults with
# `during: recompute` strike there.
Repeating = Callable[[Microbatch], AbstractContextManager[Fetched]]

_REMEDY = (
    "Test memory and processors of both machines, or give the same command again with three workers "
    "(scaling.num_workers): of three it can be told which one is wrong. recompute.every=null ends this check"
)
_NOT_DETERMINISTIC = (
    "So what is computed follows from more than the samples, step and seed: an operation that is not deterministic, "
    "randomness of the model's own, or machines that differ in libraries. recompute.every=null ends this check"
)


class Recompute:
    """Check that repeats a microbatch on a second rank.

    `app/steadfast/guards/corruption.py` chooses the step, the microbatch and the ranks.
    """

    def __init__(
        self, choice: Choice, repeating: Repeating, buckets: GradientBuckets, runtime: Runtime, world: World
    ) -> None:
        self._choice = choice
        self._repeating = repeating
        self._buckets = buckets
        self._runtime = runtime
        self._world = world
        self._check: Check | None = None  # check of the current step
        self._own: Tensor | None = None  # this rank's digest in the check, () int64
        self._run: Run

    def begin(self, step: int, run: Run) -> None:
        """Begin a step, while all gradients are zero."""
        self._check = self._choice(step)
        self._own = None
        self._run = run
        # The second rank computes first of all, because no other gradient may be in the buckets then.
        if self._check is not None and self._check.second == self._world.rank:
            self._own = self._compute(self._check.microbatch)

    @contextmanager
    def holding(self, microbatch: Microbatch) -> Iterator[bool]:
        """Run a microbatch in the context.

        The context's value is whether the gradient is held back, so that `take` must be called.
        """
        check = self._check
        if check is None or check.owner != self._world.rank or check.microbatch != microbatch:
            yield False
            return
        with self._buckets.held():
            yield True

    def take(self, loss_sum: Tensor, count: Tensor | int) -> None:
        """Digest the gradient of the held microbatch.

        At that time the buckets contain no other gradient.
        """
        # A wrong loss may leave the gradient intact, but would stay in the ledger, so loss and count are digested too.
        counted = torch.as_tensor(count, dtype=torch.float64, device=loss_sum.device)
        self._own = digest([self._buckets.digest(), loss_sum, counted])

    def compare(self) -> None:
        """Compare the two results of this step's check.

        A collective in a step that is checked.

        Raises:
            Corrupted: one rank computed wrongly.
            TrainingError: the results differ, and the faulty rank cannot be identified.
        """
        if self._check is None:
            return
        digests = self._exchange()
        if differ(self._check, digests):
            self._find_out(self._check, digests)

    def _compute(self, microbatch: Microbatch) -> Tensor:
        """Return the digest of a microbatch computed as its owner does.

        The gradients are zero again afterwards.
        """
        with self._repeating(microbatch) as fetched, self._buckets.held():
            self.take(*self._run(fetched))
        self._buckets.clear()
        assert self._own is not None
        return self._own

    def _exchange(self) -> list[int]:
        """Return each rank's digest, 0 for a rank without one. A collective."""
        own = 0 if self._own is None else int(self._own)  # waits for the device, but only in steps that are checked
        digests: list[int] = gather_numbers(own, self._world.groups.control).tolist()
        return digests

    def _find_out(self, check: Check, digests: Sequence[int]) -> None:
        """Repeat the microbatch and raise the verdict. A collective."""
        # Collectives that still use the buckets would corrupt the repetition. No update follows in this step, so the
        # gradients can be cleared.
        self._world.groups.gate()
        self._buckets.clear()
        again = check.ranks if check.third is None else (check.third,)
        self._own = self._compute(check.microbatch) if self._world.rank in again else None
        self._world.progress.mark("gradients")
        more = self._exchange()
        hardware = gather_objects(read_hardware(self._runtime.device), self._world.groups.control)
        rank = odd_one_out(check, digests, more)
        computed = _computed(check, digests, more)
        cause = _cause(check, rank, hardware, computed)
        # One rank publishes the event for all. The faulty rank cannot be trusted, and its process ends at once.
        witness, *_ = sorted(set(check.ranks) - {rank})
        if self._world.rank == witness:
            self._runtime.publish(_event(check, rank, hardware, computed, cause).of_attempt(self._world.attempt))
        if rank is None:
            raise TrainingError(cause)
        raise Corrupted(rank, witness, cause)


def adds_parts_by_themselves(run: RunConfig, world: World) -> bool:
    """Return whether the run sums gradients by forward, not microbatch.

    An exact run with smaller forwards adds up the gradient of each forward by itself, so that a microbatch has no
    gradient that could be compared.
    """
    return run.exact and world.amendments.forward_size is not None


def build_choice(
    recompute: RecomputeConfig, run: RunConfig, world: World, plan: Plan, kinds: Sequence[str]
) -> Choice | None:
    """Return the choice of checks that the configuration asks for.

    The result is None if nothing is computed twice.

    Args:
        kinds: kind of hardware of each rank; ranks of one kind compute equal bits.
    """
    every = recompute.every
    if every is None or adds_parts_by_themselves(run, world):
        return None
    return partial(choose, plan, int(every.count), run.seed, kinds)


def build_recompute(
    choice: Choice, repeating: Repeating, parallel: Parallel, runtime: Runtime, world: World
) -> Recompute:
    """Return the check of an attempt."""
    assert parallel.buckets is not None, "the configuration has been checked"
    return Recompute(choice, repeating, parallel.buckets, runtime, world)


def _computed(check: Check, digests: Sequence[int], more: Sequence[int]) -> dict[str, tuple[str, ...]]:
    """Return each rank's digests, in the order of computation."""
    computed: dict[str, tuple[str, ...]] = {}  # by rank as text, because an event is written as JSON
    for rank in check.ranks:
        if check.third is None:
            computed[str(rank)] = (_hex(digests[rank]), _hex(more[rank]))
        else:
            # The third rank has computed only the repetition, and the other two only the first time.
            computed[str(rank)] = (_hex(more[rank] or digests[rank]),)
    return computed


def _hex(digest: int) -> str:
    # Ranks exchange digests as signed 64-bit numbers, whose minus sign would look like a part of the digest.
    return f"{digest % 2**64:016x}"


def _cause(
    check: Check, rank: int | None, hardware: Sequence[Hardware], computed: Mapping[str, tuple[str, ...]]
) -> str:
    step, index = check.microbatch.step, check.microbatch.index
    if rank is not None:
        named = f"step {step}: rank {rank} ({hardware[rank]}) computes wrongly"
        others = " and ".join(str(each) for each in check.ranks if each != rank)
        if check.third is None:
            return f"{named}: of microbatch {index} it came to two different gradients, rank {others} to the same twice"
        return f"{named}: of microbatch {index} it came to another gradient than ranks {others}"
    named = " and ".join(f"rank {each} ({hardware[each]})" for each in check.ranks)
    differ = f"step {step}: {named} came to different gradients of microbatch {index}"
    if check.third is not None or any(len(set(own)) > 1 for own in computed.values()):
        return f"{differ}, and so did whoever computed it again. {_NOT_DETERMINISTIC}"
    return f"{differ}, each to the same twice: one of the two computes wrongly, or holds a wrong weight. {_REMEDY}"


def _event(
    check: Check, rank: int | None, hardware: Sequence[Hardware], computed: Mapping[str, tuple[str, ...]], cause: str
) -> Notice:
    odd = None if rank is None else hardware[rank]
    return Notice(
        event="corruption",
        text=f"wrong result found in {cause}",
        step=check.microbatch.step,
        microbatch=check.microbatch.index,
        rank=rank,
        node=odd and odd.host,
        device=odd and odd.device,
        gpu_uuid=odd and (odd.uuid or None),
        gpu_serial=odd and (odd.serial or None),
        digests=computed,
        cause=cause,
    )
