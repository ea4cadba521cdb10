"""The sample ledger: one line for every committed step, and what the lines say together."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from app.agree import Agreed
from app.plan import Plan
from app.rundir import STEPS
from app.runtime import World
from app.storage import Store
from app.stream import last_lines, open_stream, read_lines


class Ledger:
    """Written by the leader alone, when the control word of a step has been read.

    Several attempts may have written the same step; the last attempt's line holds, the others are lost steps.
    """

    def __init__(self, store: Store, world: World, plan: Plan) -> None:
        self._world, self._plan = world, plan
        self._stream = open_stream(store, STEPS) if world.leader else None

    def commit(self, steps: Iterable[tuple[Agreed, float, float]]) -> None:
        """Writes steps down, each with the seconds it took and the time at which it ended on the leader."""
        self._write([self._line(*each) for each in steps])

    def as_planned(self, step: int, samples_digest: int) -> None:
        """Writes down what the plan says of a step: one that is left out, with what would have been in it; or one that
        survivors hold complete, but whose word died with a worker, marked as unconfirmed."""
        start, stop = self._plan.positions(step)
        skipped = step in self._plan.skip
        planned = Agreed(step, math.nan, 0, math.nan, 0 if skipped else stop - start, samples_digest, finite=True)
        mark = {"skipped": True, "positions": (start, stop)} if skipped else {"confirmed": False}
        self._write([{**self._line(planned, 0.0, time.time()), "loss": None, **mark}])

    def _line(self, agreed: Agreed, step_s: float, ended_s: float) -> dict[str, Any]:
        return {
            "step": agreed.step,
            "attempt": self._world.attempt,
            "world_size": self._world.size,
            "shares": self._plan.shares_at(agreed.step),
            "num_samples": agreed.num_samples,
            "samples_digest": f"{agreed.samples_digest:016x}",
            "loss": agreed.loss,
            "step_s": round(step_s, 6),
            "time_s": round(ended_s, 4),
        }

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if self._stream is not None:
            self._stream.write(lines)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()


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


def recent_losses(store: Store, step: int) -> list[float]:
    """Of the last steps up to `step`, oldest first; few, or none, where much had to be done again."""
    lines = {line["step"]: line["loss"] for line in last_lines(store, STEPS)}
    losses = [lines[each] for each in sorted(lines) if each <= step]
    return [loss for loss in losses if loss is not None and math.isfinite(loss)]


def read_ledger(store: Store) -> History:
    return History(list(read_lines(store, STEPS)))
