"""Policies of what a failure costs. Each is told what has happened and decides; coordinator and slots carry it out."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Budgets:
    """Count the failures of each kind since the last progress, and end a run that has too many."""

    limits: Mapping[str, int]  # kind -> how many in a row a run survives; other kinds, as preemptions, are not counted
    _rows: dict[str, tuple[int, int]] = field(default_factory=dict)  # kind -> (furthest step, failures since)
    _last_attempt: dict[str, int] = field(default_factory=dict)  # kind -> the newest attempt that has paid for a loss

    def spend(self, kind: str, step: int, attempt: int | None = None) -> str | None:
        """Count a failure at `step`. Return why the run must end, or None if it goes on.

        Args:
            attempt: the attempt that lost a worker. All workers of one kind that it loses are one failure: a switch
                that fails takes many at once.
        """
        if kind not in self.limits:
            return None
        if attempt is not None:
            if attempt <= self._last_attempt.get(kind, -1):
                return None
            self._last_attempt[kind] = attempt
        furthest, spent = self._rows.get(kind, (-1, 0))
        # A step before the furthest one is not progress: it is being done again after a restore.
        if step > furthest:
            spent = 0
        spent += 1
        self._rows[kind] = (max(step, furthest), spent)
        allowed = self.limits[kind]
        if spent <= allowed:
            return None
        return f"{spent} failures ({kind}) and no step beyond {step}; recovery allows {allowed} in a row"


@dataclass
class BrokenWorlds:
    """Count the worlds in a row that could not communicate, and did not finish a step. Deaths are not its business."""

    # The second one shows that it was no accident: such an error is a setting far more often than a moment's weakness.
    allowed: int = 1
    _in_a_row: int = 0
    _stepped: int = 0  # the newest attempt that has finished a step

    def stepped(self, attempt: int) -> None:
        """Take note that an attempt has finished its first step."""
        self._stepped = attempt
        self._in_a_row = 0

    def count(self, attempt: int) -> str | None:
        """Count an attempt that broke while all of its workers lived. Return why the run must end, or None."""
        if attempt == self._stepped:
            return None
        self._in_a_row += 1
        if self._in_a_row <= self.allowed:
            return None
        return f"{self._in_a_row} attempts in a row broke before they had finished a step"


@dataclass
class Quarantine:
    """Name the nodes on which workers keep dying young, or compute wrongly, so that they get no more for a while."""

    failures: int = 3  # so many early deaths put a node into quarantine
    min_lifetime_s: float = 20.0  # a worker that has lived longer does not speak against its node
    cooldown_s: float = 600.0  # how long a node is avoided, and how long a death is remembered
    _deaths_s: dict[str, list[float]] = field(default_factory=dict)
    _until_s: dict[str, float] = field(default_factory=dict)

    def record_death(self, node: str, lived_s: float, now_s: float, elsewhere: bool) -> bool:
        """Record the death of a worker on `node`. Return whether the node is quarantined from now on."""
        if lived_s > self.min_lifetime_s:
            self._deaths_s.pop(node, None)
            return False
        recent = [when_s for when_s in self._deaths_s.get(node, []) if now_s - when_s < self.cooldown_s]
        recent.append(now_s)
        self._deaths_s[node] = recent
        return len(recent) >= self.failures and self.avoid(node, now_s, elsewhere)

    def avoid(self, node: str, now_s: float, elsewhere: bool) -> bool:
        """Put a node into quarantine, unless the run has nowhere else to go. Return whether it is from now on.

        Args:
            elsewhere: whether a worker lives on another node.
        """
        if not elsewhere:
            return False
        self._deaths_s.pop(node, None)
        self._until_s[node] = now_s + self.cooldown_s
        return True

    def avoided(self, now_s: float) -> list[str]:
        """Return the nodes on which nothing may be placed now."""
        return sorted(node for node, until_s in self._until_s.items() if now_s < until_s)
