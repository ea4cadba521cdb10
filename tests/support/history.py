"""All lines of a run's ledger, for tests."""

from dataclasses import dataclass
from typing import Any

from steadfast.run.directory import STEPS
from steadfast.storage import Store
from steadfast.storage.jsonl import read_lines


@dataclass(frozen=True)
class History:
    """Lines of a run's ledger."""

    lines: list[dict[str, Any]]  # in the order of the file

    @property
    def committed(self) -> dict[int, dict[str, Any]]:
        """Return the valid line of each step."""
        # Lines are sorted by attempt, because a disconnected leader may write its last lines after the first lines of
        # its successor.
        return {line["step"]: line for line in sorted(self.lines, key=lambda line: line["attempt"])}

    @property
    def num_lost(self) -> int:
        """Return the number of lost steps."""
        return len(self.lines) - len(self.committed)

    @property
    def last_step(self) -> int:
        return max((line["step"] for line in self.lines), default=0)


def read_ledger(store: Store) -> History:
    """Return all lines of the ledger."""
    return History(list(read_lines(store, STEPS)))
