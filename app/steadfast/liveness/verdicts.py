"""Compute how long to wait before a worker counts as lost.

The end of a process is a fact. The verdict that a live worker is hung, stuck or silent for ever is a guess. A guess is
reported at once, but the worker is ended only when waiting has cost as much as a wrong verdict would. So a wrong
verdict costs at most twice as much as the best choice. The module is pure.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from steadfast.run import events
from steadfast.run.events import Event

# Multiples of `recovery.hang_limit_s`.
_LAST_HOLDER = 5  # if ending the suspects would lose steps
_OWN_CODE = 10  # if no rank waits for another rank
_REMEMBERED = 5  # newest starts of attempts that the median is taken of


class Guess(StrEnum):
    """Suspected fault of some members of a world."""

    UNREACHABLE = "unreachable"  # the members' machine acknowledges nothing any more
    SILENT = "silent"  # the machine acknowledges data, but the members send no heartbeats
    STUCK = "stuck"  # the other members wait for the suspects
    ALL_WAIT = "all wait"  # all members have the same progress, and some may be inside a collective
    SLOW = "slow"  # all members run code of their own, and no member waits for another


@dataclass(frozen=True)
class Price:
    """Cost of ending some members of a world now."""

    reform_s: float = 0.0  # time until the remaining members do the next step
    lost_steps: int = 0  # steps to repeat, because no other member holds their result
    step_s: float = 0.0  # duration of one step

    @property
    def seconds(self) -> float:
        return self.reform_s + self.lost_steps * self.step_s


def patience_s(guess: Guess, usual_s: float, price: Price, hang_limit_s: float, stretch: float = 1.0) -> float:
    """Return the seconds to wait before suspects are ended.

    Args:
        usual_s: time that may be normal. For a phase, the limit from its earlier durations; for silence, `silence_s`.
        stretch: factor for an overloaded machine, on which the coordinator or the worker wakes late.
    """
    if guess is Guess.UNREACHABLE and not price.lost_steps:
        return usual_s * stretch  # a dead machine is almost certain, and a wrong verdict would lose no steps
    least_s = hang_limit_s
    if guess is Guess.UNREACHABLE:
        least_s = usual_s
    elif guess is Guess.SLOW:
        least_s = _OWN_CODE * hang_limit_s
    elif price.lost_steps:
        least_s = _LAST_HOLDER * hang_limit_s
    return max(least_s, usual_s, price.seconds) * stretch


class Costs:
    """Estimate of what ending members of a world costs.

    The estimate follows from the durations of this run's attempts and steps.
    """

    def __init__(self) -> None:
        self._reform_s: list[float] = []
        self._sharded = False
        self._saved = 0  # the newest step that is stored outside of the workers' processes
        self._step = 0
        self._first: tuple[float, int] | None = None  # time and step when the attempt was first seen
        self._step_s = 0.0

    def record(self, event: Event) -> None:
        """Update the estimated costs of ending members with an event of the run."""
        match event:
            case events.ModelSharded():
                self._sharded = True
            case events.Checkpoint(step=step):
                self._saved = max(self._saved, step)
            case events.Log(step=step, at_risk={"workers": int(lost_steps)}):
                self._saved = max(self._saved, step - lost_steps)
            case events.AttemptStarted():
                self._reform_s.append(event.formed_s + event.built_s + event.restored_s + event.first_step_s)
                del self._reform_s[:-_REMEMBERED]
                self._first = None
                self._step = event.step
                if event.source in ("checkpoint", "snapshot", "start"):
                    self._saved = event.step

    def reached(self, step: int, now_s: float) -> None:
        """Record that the world has finished a step."""
        if self._first is None:
            self._first = (now_s, step)
        if step > self._step:
            self._step = step
            self._step_s = (now_s - self._first[0]) / max(1, step - self._first[1])

    def price(self, ending: Collection[str], world: Collection[str]) -> Price:
        """Return the cost of ending some members of a world."""
        # A coordinator asks this for each silent worker, so the usual answers take no sets of all members.
        all_end = ending is world or (len(ending) >= len(world) and set(world) <= set(ending))
        last_holders = self._sharded or all_end
        lost_steps = 0
        if last_holders and self._step:
            # At least one step is lost, because the members may have finished steps since their last heartbeat.
            lost_steps = max(1, self._step - self._saved)
        return Price(median(self._reform_s or [0.0]), lost_steps, self._step_s)
