"""The sample ledger: one line for every committed step, and what the lines say together."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.agree import Agreed
from app.files import append_line, read_lines
from app.runtime import World


class Ledger:
    """Written by the leader alone, when the control word of a step has been read.

    Several attempts may have written the same step; the last attempt's line holds, the others are lost steps.
    """

    def __init__(self, path: Path, world: World, shares: tuple[int, ...]) -> None:
        self._path, self._world, self._shares = path, world, shares

    def commit(self, agreed: Agreed, step_s: float) -> None:
        if not self._world.leader:
            return
        append_line(
            self._path,
            {
                "step": agreed.step,
                "attempt": self._world.attempt,
                "world_size": self._world.size,
                "shares": self._shares,
                "num_samples": agreed.num_samples,
                "samples_digest": f"{agreed.samples_digest:016x}",
                "loss": agreed.loss,
                "step_s": round(step_s, 6),
                "time_s": round(time.time(), 4),
            },
        )


@dataclass(frozen=True)
class History:
    """What a run has done, read from its ledger.

    committed: the line that holds, by step. num_lost: lines that were done again.
    """

    lines: list[dict[str, Any]]

    @property
    def committed(self) -> dict[int, dict[str, Any]]:
        return {line["step"]: line for line in sorted(self.lines, key=lambda line: line["attempt"])}

    @property
    def num_lost(self) -> int:
        return len(self.lines) - len(self.committed)

    @property
    def last_step(self) -> int:
        return max((line["step"] for line in self.lines), default=0)

    @property
    def last_time_s(self) -> float:
        return max((line["time_s"] for line in self.lines), default=0.0)


def read_ledger(path: Path) -> History:
    return History(list(read_lines(path)))
