"""All lines of a run's ledger, for tests."""

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from steadfast.run.directory import STEPS
from steadfast.run.ledger import read_shares
from steadfast.storage import Store
from steadfast.storage.jsonl import open_stream, read_lines


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
    def shares(self) -> list[tuple[int, ...]]:
        """Return the microbatches of each rank, line by line."""
        return [tuple(read_shares(line) or ()) for line in self.lines]

    @property
    def last_step(self) -> int:
        return max((line["step"] for line in self.lines), default=0)


def read_ledger(store: Store) -> History:
    """Return all lines of the ledger."""
    return History(list(read_lines(store, STEPS)))


def write_ledger(store: Store, lines: Iterable[dict[str, Any]]) -> None:
    """Add lines to the ledger."""
    with closing(open_stream(store, STEPS)) as stream:
        stream.write(lines)
