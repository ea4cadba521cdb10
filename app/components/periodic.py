"""What is done now and then between two steps: on all ranks, after the same step."""

from collections.abc import Callable
from typing import NamedTuple

from app.components.trigger import Trigger
from app.world.control import ControlChannel
from app.world.runtime import CHECKPOINT, FINISH, LEAVE, STOP, Signals


class _Act(NamedTuple):
    name: str
    trigger: Trigger
    run: Callable[[int], object]


class Periodic:
    """The periodic acts of an attempt, in the order in which they follow a step of a run of `num_steps`."""

    def __init__(self, leader: bool, num_steps: int) -> None:
        self._leader = leader
        self._num_steps = num_steps
        self._acts: list[_Act] = []
        self.names: list[str] = []  # what a rank may request: the control channel has to know it

    def add(self, name: str, trigger: Trigger, run: Callable[[int], object]) -> None:
        """Add an act: `run(step)` whenever `trigger` says so. On all ranks alike."""
        self._acts.append(_Act(name, trigger, run))
        self.names.append(name)

    def requests(self, signals: Signals) -> set[str]:
        """Return what this rank requests: what its signals ask for, and, on the leader, what its clock says is due."""
        signalled = {STOP: signals.stop, LEAVE: signals.leave, FINISH: signals.finish, CHECKPOINT: signals.checkpoint}
        requests = {name for name, wanted in signalled.items() if wanted}
        for act in self._acts:
            # Asked on every rank, since a trigger may have something to look after, but only one clock counts.
            if act.trigger.wanted() and self._leader:
                requests.add(act.name)
        return requests

    def run(self, step: int, control: ControlChannel) -> None:
        """Carry out what is due after `step`. A collective: all ranks know of the same requests."""
        # The end of a run has acts of its own, which would do the same once more.
        if step >= self._num_steps:
            return
        for act in self._acts:
            # An attempt that is about to end writes its state anyway, so it grants no more requests.
            requested = act.name in control.requested and not control.ending
            if requested or act.trigger.due(step):
                act.run(step)
                act.trigger.done()
                control.acknowledge(act.name)
