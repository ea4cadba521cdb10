"""Policies for failures: budgets of a run, and quarantine of nodes.

The policies are pure. They record what happened and return decisions, which the coordinator and the slots carry out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Budgets:
    """Policy that ends a run after too many failures of a kind without progress."""

    limits: Mapping[str, int]  # kind -> allowed failures in a row; kinds that are missing here are not counted
    _rows: dict[str, tuple[int, int]] = field(default_factory=dict)  # kind -> (furthest step, failures since)
    _last_attempt: dict[str, int] = field(default_factory=dict)  # kind -> newest attempt whose loss was counted

    def spend(self, kind: str, step: int, attempt: int | None = None) -> str | None:
        """Count a failure at `step`. Return why the run must end, or None.

        Args:
            attempt: the attempt that lost a worker. All losses of one kind in an attempt count as one failure, because
                a failed switch takes many workers at once.
        """
        if kind not in self.limits:
            return None
        if attempt is not None:
            if attempt <= self._last_attempt.get(kind, -1):
                return None
            self._last_attempt[kind] = attempt
        furthest, spent = self._rows.get(kind, (-1, 0))
        # A step before the furthest one is a repetition after a restore, and no progress.
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
    """Policy that ends a run whose workers live but cannot communicate.

    It counts the attempts in a row that could not communicate before they finished a step.
    """

    # A wrong setting causes such an error far more often than an outage. So the second attempt ends the run.
    allowed: int = 1
    _in_a_row: int = 0
    _stepped: int = 0  # newest attempt that has finished a step

    def stepped(self, attempt: int) -> None:
        """Record that an attempt has finished its first step."""
        self._stepped = attempt
        self._in_a_row = 0

    def count(self, attempt: int) -> str | None:
        """Count an attempt that broke while all of its workers were alive.

        Return why the run must end, or None if the run goes on.
        """
        if attempt == self._stepped:
            return None
        self._in_a_row += 1
        if self._in_a_row <= self.allowed:
            return None
        return f"{self._in_a_row} attempts in a row broke before they had finished a step"


@dataclass
class Quarantine:
    """Policy that avoids faulty nodes for a while.

    A node is faulty if workers there keep dying early, or if one computed wrongly or could not use its GPU.
    """

    failures: int = 3  # early deaths that put a node into quarantine
    min_lifetime_s: float = 20.0  # a worker that lived longer is no sign of a faulty node
    cooldown_s: float = 600.0  # time for which a node is avoided, and for which an early death counts
    _deaths_s: dict[str, list[float]] = field(default_factory=dict)
    _until_s: dict[str, float] = field(default_factory=dict)

    def record_death(self, node: str, lived_s: float, now_s: float, elsewhere: bool) -> bool:
        """Record a worker's death. Return whether its node is quarantined now.

        Args:
            lived_s: lifetime of the worker.
            elsewhere: whether a worker lives on another node.
        """
        if lived_s > self.min_lifetime_s:
            self._deaths_s.pop(node, None)
            return False
        # Deaths that are long ago do not add up, because a node of a long run loses a worker now and then.
        recent = [when_s for when_s in self._deaths_s.get(node, []) if now_s - when_s < self.cooldown_s]
        recent.append(now_s)
        self._deaths_s[node] = recent
        return len(recent) >= self.failures and self.avoid(node, now_s, elsewhere)

    def avoid(self, node: str, now_s: float, elsewhere: bool) -> bool:
        """Put a node into quarantine, unless it is the only one.

        Return whether the node is in quarantine now.

        Args:
            elsewhere: whether a worker lives on another node.
        """
        if not elsewhere:
            return False
        self._deaths_s.pop(node, None)
        self._until_s[node] = now_s + self.cooldown_s
        return True

    def avoided(self, now_s: float) -> list[str]:
        """Return the nodes that get no worker now."""
        return sorted(node for node, until_s in self._until_s.items() if now_s < until_s)
