"""Periodic acts between two steps, on all ranks after the same step."""

from collections.abc import Callable
from typing import NamedTuple

from steadfast.loop.trigger import Trigger
from steadfast.world.control import ControlChannel
from steadfast.world.runtime import CHECKPOINT, LEAVE, STOP, Signals


class _Act(NamedTuple):
    name: str
    trigger: Trigger
    run: Callable[[int], object]


class Periodic:
    """Periodic acts of an attempt, in the order of their execution.

    Args:
        at_end: returns whether the run ends now, the same on all ranks.
    """

    def __init__(self, leader: bool, at_end: Callable[[], bool]) -> None:
        self._leader = leader
        self._at_end = at_end
        self._acts: list[_Act] = []
        self.names: list[str] = []  # of the acts that a rank may request through the control channel

    def add(self, name: str, trigger: Trigger, run: Callable[[int], object]) -> None:
        """Add an act that runs when `trigger` is due, on all ranks."""
        self._acts.append(_Act(name, trigger, run))
        self.names.append(name)

    def requests(self, signals: Signals) -> set[str]:
        """Return this rank's requests; the leader adds the acts that are due."""
        signalled = {STOP: signals.stop, LEAVE: signals.leave, CHECKPOINT: signals.checkpoint}
        requests = {name for name, wanted in signalled.items() if wanted}
        for act in self._acts:
            # Every rank asks its trigger, which may have upkeep to do, but only the leader's clock counts.
            if act.trigger.wanted() and self._leader:
                requests.add(act.name)
        return requests

    def run(self, step: int, control: ControlChannel) -> None:
        """Carry out the acts that are due after `step`. A collective."""
        # The end of a run has acts of its own, which would repeat these. A validation may bring the end about.
        if self._at_end():
            return
        for act in self._acts:
            # An attempt that is about to end writes its state anyway, so requests are not carried out.
            requested = act.name in control.requested and not control.ending
            if requested or act.trigger.due(step):
                act.run(step)
                act.trigger.done()
                control.acknowledge(act.name)
                if self._at_end():
                    return
