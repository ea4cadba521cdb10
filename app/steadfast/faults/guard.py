"""Judge the numbers of finished steps before they are used."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from steadfast.config import Config
from steadfast.data import Loader
from steadfast.errors import TrainingError
from steadfast.faults.numerics import BadStep, Ignore, Numerics, Rollback, Stop
from steadfast.plan import Plan
from steadfast.run import events
from steadfast.run.ledger import PastLosses, StepStats
from steadfast.world.runtime import Runtime, World, publish_once

_SHOWN = 8  # most ids in a message; the event has more
_TOLD = 64  # most microbatches in the event
_READ = 4  # most microbatches that a rank reads again to find the bad sample


class Suspect(NamedTuple):
    """Microbatch whose loss is not finite."""

    microbatch: int
    samples: list[int]  # ids
    not_finite: list[int]  # ids of samples that contain NaN or infinity, if the samples could be read again
    is_empty: bool  # whether the task counted 0 for the microbatch


class Guard:
    """Filter that passes good steps and ends the attempt at a bad one.

    All ranks get the same numbers, so all ranks end the attempt at the same step.
    """

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        world: World,
        plan: Plan,
        loader: Loader,
        units_per_sample: int | None,  # None where counts vary from sample to sample
        losses: PastLosses,
    ) -> None:
        self._task = getattr(config.task, "target", config.task.kind)
        self._runtime = runtime
        self._world = world
        self._plan = plan
        self._loader = loader
        self._units_per_sample = units_per_sample
        self._numerics = Numerics(config.recovery, world.amendments.skip, losses)

    def accept(self, finished: Iterable[StepStats]) -> Iterator[StepStats]:
        """Yield the steps up to the first bad step.

        Raises:
            BadStep: a step is not finite or spikes, and the next attempt must leave the step out.
            TrainingError: a step is not finite and the run has left out too many steps already, or the count of a task
                is invalid or differs from the count of its dataset.
        """
        for stats in finished:
            # A step that is left out has no numbers.
            if stats.step not in self._plan.skip:
                self._check_is_count(stats)
                self._judge(stats)
                self._check_count(stats)
            yield stats

    def _judge(self, stats: StepStats) -> None:
        match self._numerics.judge(stats):
            case Rollback(steps, cause):
                suspects = self._suspects(stats)
                cause = _with(cause, self._named(stats, suspects))
                event = events.Rollback(steps=steps, cause=cause, **_fields(suspects))
                publish_once(event, self._runtime, self._world)
                # No rank leaves before the event is recorded: the next attempt reads the steps to leave out from it.
                dist.barrier(self._world.groups.control)
                raise BadStep(steps, cause)
            case Ignore(cause):
                publish_once(events.Spike(step=stats.step, cause=cause), self._runtime, self._world)
            case Stop(why):
                raise TrainingError(_with(why, self._named(stats, self._suspects(stats))))

    def _suspects(self, stats: StepStats) -> list[Suspect]:
        """Return all ranks' microbatches whose loss is not finite.

        A collective if the step is not finite. A spike has no suspects: each of its losses is finite, so none stands
        out.
        """
        if stats.finite:
            return []
        own = []
        for number, ((_, index, start, stop, _), is_empty) in enumerate(stats.suspects):
            # Only the rank that trained on a microbatch reads its samples again, to find numbers that are not finite.
            not_finite = self._loader.not_finite(start, stop) if number < _READ else []
            own.append(Suspect(index, self._loader.ids(start, stop), not_finite, is_empty))
        by_rank: list[Any] = [None] * self._world.size
        dist.all_gather_object(by_rank, own, self._world.groups.control)
        found: list[Suspect] = []
        for of_rank in by_rank:
            found += of_rank
        return sorted(found)

    def _named(self, stats: StepStats, suspects: Sequence[Suspect]) -> str:
        """Describe where a step stopped being finite, "" if unknown."""
        if not suspects:
            return ""
        not_finite = _of_all(suspect.not_finite for suspect in suspects)
        if not_finite:
            return f"in the data: not finite are samples {_shown(not_finite)}"
        num_microbatches = self._plan.num_microbatches_in(stats.step)
        if len(suspects) == num_microbatches > 1:
            return f"the loss of each of the {num_microbatches} microbatches, so no sample is to blame"
        samples = _of_all(suspect.samples for suspect in suspects)
        named = f"in microbatches {_shown([each.microbatch for each in suspects])}, of samples {_shown(samples)}"
        if all(suspect.is_empty for suspect in suspects):
            named += f", in which the task {self._task} counts nothing: there its loss_sum must be 0"
        return named

    def _check_is_count(self, stats: StepStats) -> None:
        if math.isfinite(stats.count) and stats.count >= 0:
            return
        raise TrainingError(
            f"step {stats.step}: the task {self._task} counted {stats.count}. The count of its Sums has to be how many "
            "losses are in loss_sum, 0 where none is"
        )

    def _check_count(self, stats: StepStats) -> None:
        if self._units_per_sample is None:
            return
        expected = self._plan.num_samples_in(stats.step) * self._units_per_sample
        if stats.count != expected:
            raise TrainingError(
                f"step {stats.step}: the task counted {stats.count}, the dataset's units_per_sample says {expected}. "
                "A dataset with masked targets must not set counts_vary = False"
            )


def _with(what: str, named: str) -> str:
    return f"{what}, {named}" if named else what


def _fields(suspects: Sequence[Suspect]) -> dict[str, tuple[int, ...]]:
    told = suspects[:_TOLD]
    if not told:
        return {}
    return {
        "microbatches": tuple(suspect.microbatch for suspect in told),
        "samples": tuple(_of_all(suspect.samples for suspect in told)),
        "not_finite": tuple(_of_all(suspect.not_finite for suspect in told)),
    }


def _of_all(lists: Iterable[list[int]]) -> list[int]:
    found: list[int] = []
    for each in lists:
        found += each
    return found


def _shown(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    more = len(numbers) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
