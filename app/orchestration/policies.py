"""What a failure costs. Pure: each policy is told what happened and answers what follows; the coordinator and the slots
carry it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Budgets:
    """How many failures of each kind a run survives without getting any further between two of them.

    Args:
        limits: by kind; a kind that is not there is never too many (a preemption is nobody's fault).
    """

    limits: Mapping[str, int]
    _spent: dict[str, int] = field(default_factory=dict)
    _furthest: dict[str, int] = field(default_factory=dict)  # step of the last failure of a kind

    def spend(self, kind: str, step: int) -> str | None:
        """A failure at `step`. Returns why the run must end, None if it goes on."""
        if kind not in self.limits:
            return None
        if step > self._furthest.get(kind, -1):
            self._spent[kind] = 0
        self._furthest[kind] = max(step, self._furthest.get(kind, -1))
        self._spent[kind] = self._spent.get(kind, 0) + 1
        if self._spent[kind] <= self.limits[kind]:
            return None
        allowed = self.limits[kind]
        return f"{self._spent[kind]} failures ({kind}) and no step beyond {step}; recovery allows {allowed} in a row"


@dataclass
class Quarantine:
    """Nodes on which workers keep dying young get no more of them for a while.

    Args:
        failures: so many make a node suspect.
        young_s: a worker that lived longer does not speak against its node.
        sentence_s: how long nothing is placed there; also how long a failure is remembered.
    """

    failures: int = 3
    young_s: float = 20.0
    sentence_s: float = 600.0
    _died: dict[str, list[float]] = field(default_factory=dict)
    _until: dict[str, float] = field(default_factory=dict)

    def died(self, node: str, lived_s: float, now_s: float, elsewhere: bool) -> bool:
        """A worker on `node` has died. True if the node is quarantined from now on: never while nobody lives
        `elsewhere`, since a run has to have somewhere to go."""
        if lived_s > self.young_s:
            self._died.pop(node, None)
            return False
        recent = [when for when in self._died.get(node, []) if now_s - when < self.sentence_s]
        self._died[node] = [*recent, now_s]
        if len(self._died[node]) < self.failures or not elsewhere:
            return False
        del self._died[node]
        self._until[node] = now_s + self.sentence_s
        return True

    def avoided(self, now_s: float) -> list[str]:
        """Where nothing may be placed now."""
        return sorted(node for node, until in self._until.items() if now_s < until)
