"""The sample ledger: one line for every committed step, and what the lines say together."""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from app.plan import Microbatch, Plan
from app.run.directory import STEPS
from app.storage import Store
from app.storage.jsonl import first_lines, last_lines, open_stream, read_lines


@dataclass(frozen=True)
class StepStats:
    """What every rank knows of a step, at the same later step."""

    step: int
    loss: float  # mean over the global batch
    count: float  # what the loss was divided by: tokens or samples; an int, unless the task's own is not finite
    grad_norm: float  # of the whole mean gradient, before clipping
    num_samples: int
    samples_digest: int  # of all samples, unsigned 64 bit
    finite: bool
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the task, mean over the global batch
    # Known to this rank alone: its microbatches whose loss is not finite, in a step that is not.
    suspects: tuple[Microbatch, ...] = ()


class Ledger:
    """Appends to `steps.jsonl` what all ranks are known to have finished. Only the leader's ledger writes."""

    # Several attempts may have written the same step: lines are only ever appended, since a crash while one is taken
    # back could cost others. The last attempt's line holds, the others are lost steps.
    def __init__(self, store: Store, attempt: int, plan: Plan, writes: bool) -> None:
        self._attempt = attempt
        self._plan = plan
        self._stream = open_stream(store, STEPS) if writes else None

    def commit(self, steps: Iterable[tuple[StepStats, float, float]]) -> None:
        """Write steps down, each with the seconds it took and the Unix time at which it ended on the leader."""
        self._write([self._line(*each) for each in steps])

    def as_planned(self, step: int, samples_digest: int) -> None:
        """Write down what the plan says of a step of which no message told."""
        start, stop = self._plan.positions(step)
        if step in self._plan.skip:
            num_samples = 0
            mark: dict[str, Any] = {"skipped": True, "positions": (start, stop)}
        else:
            # Survivors hold it complete, but its message, with the loss, died with a worker.
            num_samples = stop - start
            mark = {"confirmed": False}
        planned = StepStats(step, math.nan, 0, math.nan, num_samples, samples_digest, finite=True)
        self._write([{**self._line(planned, 0.0, time.time()), "loss": None, **mark}])

    def _line(self, stats: StepStats, step_s: float, ended_s: float) -> dict[str, Any]:
        return {
            "step": stats.step,
            "attempt": self._attempt,
            "world_size": len(self._plan.shares),
            "shares": self._plan.shares_at(stats.step),
            "num_samples": stats.num_samples,
            "samples_digest": f"{stats.samples_digest:016x}",
            "loss": stats.loss,
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
    """What a run has done, read from its ledger."""

    lines: list[dict[str, Any]]  # as they were written

    @property
    def committed(self) -> dict[int, dict[str, Any]]:
        """Return the line that holds, by step."""
        # By attempt, not by place: a leader that was cut off may write its last lines after its successor's first ones.
        return {line["step"]: line for line in sorted(self.lines, key=lambda line: line["attempt"])}

    @property
    def num_lost(self) -> int:
        """Return the number of lines whose step was done again."""
        return len(self.lines) - len(self.committed)

    @property
    def last_step(self) -> int:
        return max((line["step"] for line in self.lines), default=0)


@dataclass(frozen=True)
class PastLosses:
    """Losses of a run, oldest first: of the first steps of all, and of those that led to where an attempt begins."""

    first: list[float] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)  # few, or none, where much had to be done again


def past_losses(store: Store, step: int) -> PastLosses:
    """Return the losses of the ledger's first and last lines, up to `step`."""
    return PastLosses(_losses(first_lines(store, STEPS), step), _losses(last_lines(store, STEPS), step))


def _losses(lines: Iterable[dict[str, Any]], last_step: int) -> list[float]:
    losses = {line["step"]: line["loss"] for line in lines}
    found = []
    for step, loss in sorted(losses.items()):
        # A step that was left out, or whose message was lost, has no loss.
        if step <= last_step and loss is not None and math.isfinite(loss):
            found.append(loss)
    return found


def read_ledger(store: Store) -> History:
    """Return all that the ledger says."""
    return History(list(read_lines(store, STEPS)))
