"""Find the microbatches and samples that made a step not finite."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from steadfast.data import Loader
from steadfast.plan import Plan
from steadfast.run.ledger import StepStats
from steadfast.world.control import gather_objects
from steadfast.world.runtime import World

_SHOWN = 8  # most ids in a message; the event has more
_TOLD = 64  # most microbatches in the event
_READ = 4  # most microbatches that a rank reads again to find the bad sample


class Suspect(NamedTuple):
    """Microbatch whose loss is not finite."""

    microbatch: int
    samples: list[int]  # ids
    not_finite: list[int]  # ids of samples that contain NaN or infinity, if the samples could be read again
    is_empty: bool  # whether the task counted 0 for the microbatch


class SuspectFinder:
    """Finder of the suspects of a step.

    Args:
        task: name of the task, for messages.
    """

    def __init__(self, task: str, plan: Plan, loader: Loader, world: World) -> None:
        self._task = task
        self._plan = plan
        self._loader = loader
        self._world = world

    def find(self, stats: StepStats) -> list[Suspect]:
        """Return all ranks' microbatches whose loss is not finite.

        A collective if the step is not finite.
        """
        # A spike has no suspects: each of its losses is finite, so none stands out.
        if stats.finite:
            return []
        own = []
        for number, ((_, index, start, stop, _), is_empty) in enumerate(stats.suspects):
            # Only the rank that trained on a microbatch reads its samples again, to find numbers that are not finite.
            not_finite = self._loader.train.not_finite(start, stop) if number < _READ else []
            own.append(Suspect(index, self._loader.train.ids(start, stop), not_finite, is_empty))
        return sorted(chain.from_iterable(gather_objects(own, self._world.groups.control)))

    def describe(self, stats: StepStats, suspects: Sequence[Suspect]) -> str:
        """Describe where a step stopped being finite, "" if unknown."""
        if not suspects:
            return ""
        numbers = _joined(suspects)
        if numbers["not_finite"]:
            return f"in the data: not finite are samples {_shown(numbers['not_finite'])}"
        num_microbatches = self._plan.num_microbatches_in(stats.step)
        if len(suspects) == num_microbatches > 1:
            return f"the loss of each of the {num_microbatches} microbatches, so no sample is to blame"
        named = f"in microbatches {_shown(numbers['microbatches'])}, of samples {_shown(numbers['samples'])}"
        if all(suspect.is_empty for suspect in suspects):
            named += f", in which the task {self._task} counts nothing: there its loss_sum must be 0"
        return named


def fields_of(suspects: Sequence[Suspect]) -> dict[str, tuple[int, ...]]:
    """Return the fields that describe suspects in an event, {} without suspects."""
    # If the weights are not finite, every microbatch of the step is a suspect, and the event's line would be long.
    told = suspects[:_TOLD]
    if not told:
        return {}
    return {name: tuple(numbers) for name, numbers in _joined(told).items()}


def _joined(suspects: Sequence[Suspect]) -> dict[str, list[int]]:
    microbatches: list[int] = []
    samples: list[int] = []
    not_finite: list[int] = []
    for suspect in suspects:
        microbatches.append(suspect.microbatch)
        samples += suspect.samples
        not_finite += suspect.not_finite
    return {"microbatches": microbatches, "samples": samples, "not_finite": not_finite}


def _shown(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    num_more = len(numbers) - _SHOWN
    if num_more > 0:
        shown += f" and {num_more} more"
    return shown
