"""What a guess costs: how long to wait before somebody who seems hung, stuck or silent is taken for lost.

That a process has ended is a fact; that it will never go on is a guess. A guess is told at once. It is acted on when
waiting has cost as much as being wrong would, so that a wrong one costs at most twice what the best choice would have.
All of it is pure.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from app.run import events
from app.run.events import Event

# Multiples of `recovery.stall_s`.
_LAST_HOLDER = 5  # where ending the suspects would lose steps
_OWN_CODE = 10  # where nobody waits for anybody
_REMEMBERED = 5  # starts of attempts


class Guess(StrEnum):
    """What seems to be wrong with some members of a world."""

    UNREACHABLE = "unreachable"  # their machine takes nothing any more
    SILENT = "silent"  # their machine does, but they send no heartbeats
    STUCK = "stuck"  # others wait for them
    ALL_WAIT = "all wait"  # nobody can be told from the others, and some may be inside a collective
    SLOW = "slow"  # all are in code of their own, and nobody waits for anybody


@dataclass(frozen=True)
class Price:
    """What it would cost to end some members of a world now."""

    reform_s: float = 0.0  # until those who are left do the next step
    lost_steps: int = 0  # that would be done again, since nobody else holds them
    step_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.reform_s + self.lost_steps * self.step_s


def patience_s(guess: Guess, usual_s: float, price: Price, stall_s: float, stretch: float = 1.0) -> float:
    """Return after how many seconds a guess is acted on.

    Args:
        usual_s: what may well be ordinary: for a phase, its limit by what it took before; for silence, `silence_s`.
        stretch: how much longer everything takes, because the watcher or the watched wake late.
    """
    if guess is Guess.UNREACHABLE and not price.lost_steps:
        return usual_s * stretch  # as good as a fact
    least_s = stall_s
    if guess is Guess.UNREACHABLE:
        least_s = usual_s
    elif guess is Guess.SLOW:
        least_s = _OWN_CODE * stall_s
    elif price.lost_steps:
        least_s = _LAST_HOLDER * stall_s
    return max(least_s, usual_s, price.seconds) * stretch


class Costs:
    """Follows what attempts and steps of this run have taken, and says what ending members of a world would cost."""

    def __init__(self) -> None:
        self._reform_s: list[float] = []
        self._sharded = False
        self._saved = 0  # the newest step that stands outside of the workers' processes
        self._step = 0
        self._first: tuple[float, int] | None = None  # time and step when the attempt was first seen
        self._step_s = 0.0

    def record(self, event: Event) -> None:
        """Take note of an event of the run."""
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
        """Take note that the world has done a step."""
        if self._first is None:
            self._first = (now_s, step)
        if step > self._step:
            self._step = step
            self._step_s = (now_s - self._first[0]) / max(1, step - self._first[1])

    def price(self, ending: Collection[str], world: Collection[str]) -> Price:
        """Return what it would cost to end some members of a world."""
        last_holders = self._sharded or set(world) <= set(ending)
        # At least one: how many they have done since their last report, nobody knows.
        lost_steps = max(1, self._step - self._saved) if last_holders and self._step else 0
        return Price(median(self._reform_s or [0.0]), lost_steps, self._step_s)
