"""Judges the numbers of finished steps, before anything is built on them."""

from collections.abc import Iterable, Iterator

import torch.distributed as dist

from app.config import RecoveryConfig
from app.errors import TrainingError
from app.faults.numerics import BadStep, Ignore, Numerics, Rollback, Stop
from app.plan import Plan
from app.run import events
from app.run.ledger import StepStats
from app.world.runtime import Runtime, World, publish_once


class Guard:
    """Lets good steps pass, and ends the attempt at a bad one: on every rank alike, since all know the same numbers."""

    def __init__(
        self,
        config: RecoveryConfig,
        runtime: Runtime,
        world: World,
        plan: Plan,
        units_per_sample: int | None,  # None where counts vary from sample to sample
        losses: Iterable[float],
    ) -> None:
        self._runtime = runtime
        self._world = world
        self._plan = plan
        self._units_per_sample = units_per_sample
        self._numerics = Numerics(config, world.skip, losses)

    def accept(self, finished: Iterable[StepStats]) -> Iterator[StepStats]:
        """Yield the steps one by one as far as they are good.

        Raises:
            BadStep: a step is not finite or spikes; it is to be left out.
            TrainingError: it is, and too many have been left out already; or a task counts otherwise than its dataset.
        """
        for stats in finished:
            # A step that is left out has no numbers.
            if stats.step not in self._plan.skip:
                self._judge(stats)
                self._check_count(stats)
            yield stats

    def _judge(self, stats: StepStats) -> None:
        match self._numerics.judge(stats):
            case Rollback(steps, cause):
                publish_once(events.Rollback(steps=steps, cause=cause), self._runtime, self._world)
                # Nobody leaves before it is written down: the next attempt has to know the steps to leave out.
                dist.barrier(self._world.groups.control)
                raise BadStep(steps, cause)
            case Ignore(cause):
                publish_once(events.Spike(step=stats.step, cause=cause), self._runtime, self._world)
            case Stop(why):
                raise TrainingError(why)

    def _check_count(self, stats: StepStats) -> None:
        if self._units_per_sample is None:
            return
        expected = self._plan.num_samples_in(stats.step) * self._units_per_sample
        if stats.count != expected:
            raise TrainingError(
                f"step {stats.step}: the task counted {stats.count}, the dataset's units_per_sample says {expected}. "
                "A dataset with masked targets must not set counts_vary = False"
            )
