"""Compare the states of ranks at a checkpoint, and go back if the states differ."""

from dataclasses import dataclass, replace

import torch.distributed as dist

from steadfast.checkpoint.durable import Checkpoints
from steadfast.checkpoint.state import State
from steadfast.checkpoint.writer import Writer
from steadfast.errors import TrainingError
from steadfast.guards.corruption import NO_RANK, Corrupted
from steadfast.run.directory import RunDirectory
from steadfast.run.events import RanksDiffer, RunStarted
from steadfast.world.control import any_rank
from steadfast.world.runtime import Runtime, Signals, publish_once

_REMEDY = (
    "Something changes it on single ranks: a forward or a hook that writes parameters, random numbers of an optimizer, "
    "or a broken machine"
)


@dataclass(frozen=True)
class Agreement:
    """Comparison of the ranks' states in one attempt."""

    checkpoints: Checkpoints
    writer: Writer
    directory: RunDirectory
    runtime: Runtime

    def signals(self, signals: Signals) -> Signals:
        """Request a checkpoint, which compares all ranks, if the last one differs between ranks."""
        return replace(signals, checkpoint=signals.checkpoint or self.writer.differs)

    def check(self, step: int, state: State, at_end: bool) -> None:
        """Compare the states of all ranks, at the end of an attempt or if a checkpoint differed. A collective.

        Raises:
            Corrupted: the states differ, and the next attempt goes back to the newest checkpoint.
            TrainingError: the states differ, for the second time since the command was given.
        """
        world = self.checkpoints.world
        if world.replicate == 1:
            return
        differed = any_rank(self.writer.differs, world.groups.control)
        if not (differed or at_end):
            return
        if differing := self.checkpoints.differing(state):
            self._go_back(RanksDiffer(step=step, tensor=differing[0], ranks=differing[1]))
        if differed:
            self.writer.drop()  # other ranks may have parts of that checkpoint

    def _go_back(self, event: RanksDiffer) -> None:
        world = self.checkpoints.world
        earlier = [False]
        if world.leader:
            for known in self.directory.all_events():
                if isinstance(known, RanksDiffer) or (isinstance(known, RunStarted) and not known.again):
                    earlier = [isinstance(known, RanksDiffer)]
        dist.broadcast_object_list(earlier, src=0, group=world.groups.control)
        publish_once(event, self.runtime, world)
        dist.barrier(world.groups.control)  # no rank leaves before the event is recorded
        if earlier[0]:
            raise TrainingError(f"{event.line()}, for the second time. {_REMEDY}")
        raise Corrupted(NO_RANK, NO_RANK, event.line())
