"""Promise about the training that a lost worker repeats, if no other worker holds its part of the state."""

from collections.abc import Callable

from steadfast.config import Every
from steadfast.run.events import Notice

_BEFORE_COPY = 0.5  # part of the bound after which the next copy is requested; the copy has the rest to become complete


class Promise:
    """Bound on the age of the newest complete copy: the training since its state, in steps or in seconds.

    Args:
        clock: returns the seconds of training so far.
        on: copies are made.
    """

    def __init__(self, bound: Every, clock: Callable[[], float], on: bool) -> None:
        self.in_steps = bound.unit == "steps"
        self._bound = bound
        self._most = 60 * bound.count if bound.unit == "minutes" else bound.count
        self._clock = clock
        self.broken: Notice | None = None  # says why a copy was older than the bound, once one was
        self.stated = f"the loss of a worker costs at most {bound} of training (checkpoint.lose_at_most)"
        if not on:
            self.stated = f"checkpoint.lose_at_most={bound} is not kept: no copies are made (checkpoint.node_memory)"
        self.begin(0)

    def begin(self, step: int) -> None:
        """Count from the restored state of `step`."""
        self._step = step
        # The state of the last copy, of the newest one that is complete here, and of the newest one on all ranks.
        self._begun = self._newest = self._whole = self._now()
        self._why = "a step takes too long"

    def _now(self) -> float:
        return self._step if self.in_steps else self._clock()

    def due(self, step: int) -> bool:
        """Return whether a bound in steps needs a copy after `step`, the same on every rank."""
        self._step = step
        return self.in_steps and step - self._begun >= self._most

    def is_urgent(self) -> bool:
        """Check the newest copy's age, and return whether a bound in seconds needs another copy now."""
        self._check()
        # Counted from the last copy, complete or not: while memory is refused, copies are not tried after every step.
        return not self.in_steps and self._now() - self._begun >= _BEFORE_COPY * self._most

    def begin_copy(self, step: int, last_is_whole: bool) -> None:
        """Record the beginning of a copy, and whether all ranks have kept the last one."""
        self._step = step
        if last_is_whole:
            self._whole = self._newest
        elif self._begun > self._whole:
            self._why = "a node did not keep its part of the last copy"
        self._newest = self._whole
        self._check()
        self._begun = self._now()
        self._why = "a copy takes too long"

    def complete_copy(self) -> None:
        """Record that this rank's part of the copy is complete."""
        self._check()
        self._newest = self._begun
        self._why = "a step takes too long"

    def _check(self) -> None:
        age = self._now() - self._newest
        if age > self._most and self.broken is None:
            old = f"the newest copy in node memory is {age:.4g} {'steps' if self.in_steps else 'seconds'} old"
            text = f"checkpoint.lose_at_most={self._bound} is not kept: {self._why}; {old}"
            self.broken = Notice(event="copies_late", text=text, reason=self._why)
