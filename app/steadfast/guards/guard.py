"""Judge the numbers of finished steps before they are used."""

import math
from collections.abc import Iterable, Iterator

import torch.distributed as dist

from steadfast.errors import TrainingError
from steadfast.guards.numerics import BadStep, Ignore, Numerics, Rollback, Stop
from steadfast.guards.suspects import SuspectFinder, fields_of
from steadfast.plan import Plan
from steadfast.run import events
from steadfast.run.ledger import StepStats
from steadfast.world.runtime import Runtime, World, publish_once


class CountCheck:
    """Check of the loss counts that a task reports.

    Args:
        task: name of the task, for messages.
        units_per_sample: count of each sample, None where counts vary from sample to sample.
    """

    def __init__(self, task: str, plan: Plan, units_per_sample: int | None) -> None:
        self._task = task
        self._plan = plan
        self._units_per_sample = units_per_sample

    def check_valid(self, stats: StepStats) -> None:
        """Check that the count of a step is a number of losses. Raises TrainingError."""
        if math.isfinite(stats.count) and stats.count >= 0:
            return
        raise TrainingError(
            f"step {stats.step}: the task {self._task} counted {stats.count}. The count of its Sums has to be how many "
            "losses are in loss_sum, 0 where none is"
        )

    def check_complete(self, stats: StepStats) -> None:
        """Check that the task has counted what the dataset says. Raises TrainingError."""
        if self._units_per_sample is None:
            return
        expected = self._plan.num_samples_in(stats.step) * self._units_per_sample
        if stats.count != expected:
            raise TrainingError(
                f"step {stats.step}: the task counted {stats.count}, the dataset's units_per_sample says {expected}. "
                "A dataset with masked targets must not set counts_vary = False"
            )


class Guard:
    """Filter that passes good steps and ends the attempt at a bad one.

    All ranks get the same numbers, so all ranks end the attempt at the same step.
    """

    def __init__(
        self, numerics: Numerics, counts: CountCheck, finder: SuspectFinder, runtime: Runtime, world: World
    ) -> None:
        self._numerics = numerics
        self._counts = counts
        self._finder = finder
        self._runtime = runtime
        self._world = world

    def accept(self, finished: Iterable[StepStats]) -> Iterator[StepStats]:
        """Yield the steps up to the first bad step.

        Raises:
            BadStep: a step is not finite or spikes, and the next attempt must leave the step out.
            TrainingError: a step is not finite and the run has left out too many steps already, or the count of a task
                is invalid or differs from the count of its dataset.
        """
        for stats in finished:
            # A step that is left out has no numbers.
            if stats.step not in self._world.amendments.skip:
                # The count divides the loss, so the loss of an invalid count would be judged as that of a bad step.
                self._counts.check_valid(stats)
                self._judge(stats)
                self._counts.check_complete(stats)
            yield stats

    def _judge(self, stats: StepStats) -> None:
        match self._numerics.judge(stats):
            case Rollback(steps, cause):
                suspects = self._finder.find(stats)
                cause = _with(cause, self._finder.describe(stats, suspects))
                event = events.Rollback(steps=steps, cause=cause, **fields_of(suspects))
                publish_once(event, self._runtime, self._world)
                # No rank leaves before the event is recorded: the next attempt reads the steps to leave out from it.
                dist.barrier(self._world.groups.control)
                raise BadStep(steps, cause)
            case Ignore(cause):
                text = f"a loss spike is not skipped, because recovery.max_skipped_steps is used up: {cause}"
                publish_once(events.Notice(text=text), self._runtime, self._world)
            case Stop(why):
                raise TrainingError(_with(why, self._finder.describe(stats, self._finder.find(stats))))


def _with(what: str, named: str) -> str:
    return f"{what}, {named}" if named else what
