"""The sample ledger: one line for every committed step, and what the lines say together."""

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from app.plan import Microbatch, Plan
from app.run.directory import STEPS
from app.storage import Store
from app.storage.jsonl import decode, first_lines, is_number, last_lines, open_stream, read_blocks, read_lines


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
    losses: dict[int, Any] = {}
    for line in lines:
        if isinstance(line.get("step"), int):
            losses[line["step"]] = line.get("loss")
    found = []
    for step, loss in sorted(losses.items()):
        # A step that was left out, or whose message was lost, has no loss.
        if step <= last_step and is_number(loss) and math.isfinite(loss):
            found.append(loss)
    return found


def read_ledger(store: Store) -> History:
    """Return all that the ledger says. Of a long run that is more than fits into memory; see `Totals`."""
    return History(list(read_lines(store, STEPS)))


_COLUMNS = ("step", "attempt", "num_samples", "step_s", "time_s")
_CHUNK = 2**20  # steps
_WORTH_AN_IMPORT_BYTES = 2**20


@dataclass
class Span:
    """The time in which an attempt has written to the ledger."""

    first_s: float = math.inf  # when its first step ended
    first_step_s: float = 0.0  # how long that took
    last_s: float = -math.inf


class Totals:
    """What a ledger comes to, read line by line: it may be of any length.

    Args:
        starts_s: when the commands of the run began, oldest first.

    Attributes:
        starts_s: as given.
        samples: of the steps that hold.
        productive_s: seconds in these.
        num_lost: lines whose step was done again.
        ends_s: the last time that is known of each command; -inf if there is none.
        spans: by attempt.
    """

    def __init__(self, starts_s: Sequence[float] = ()) -> None:
        self.samples = 0
        self.productive_s = 0.0
        self.num_lost = 0
        self.ends_s = [-math.inf] * len(starts_s)
        self.spans: dict[int, Span] = {}
        self.starts_s = list(starts_s)
        # By chunk: of each step the attempt whose line holds, 0 for none, its samples and its seconds. All that is
        # kept of a step, since it may be done again.
        self._steps: dict[int, tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.float32]]] = {}

    @classmethod
    def read(cls, store: Store, starts_s: Sequence[float], mark: Callable[[], object] = lambda: None) -> Self:
        """Read a run's ledger. `mark` is called again and again meanwhile."""
        totals = cls(starts_s)
        for block in read_blocks(store, STEPS):
            totals.add(_numbers(block, _COLUMNS))
            mark()
        return totals

    def add(self, lines: NDArray[np.float64]) -> None:
        """Add lines, (lines, columns), in the order in which they were written."""
        # Others are not of our writing.
        lines = lines[((lines[:, :3] >= (1, 1, 0)) & (lines[:, :3] < 2**32)).all(axis=1)]
        if not len(lines):
            return
        steps = lines[:, 0].astype(np.int64)
        # Where one attempt goes on from step to step, its lines are added at once.
        breaks = (np.diff(steps) != 1) | (np.diff(lines[:, 1]) != 0) | (steps[1:] % _CHUNK == 0)
        bounds = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(lines)]
        for start, stop in pairwise(bounds):
            self._add_run(int(steps[start]), lines[start:stop])

    def _add_run(self, first_step: int, lines: NDArray[np.float64]) -> None:
        number, offset = divmod(first_step, _CHUNK)
        if number not in self._steps:
            empty = np.zeros(_CHUNK, np.uint32)
            self._steps[number] = (empty, np.zeros(_CHUNK, np.uint32), np.zeros(_CHUNK, np.float32))
        attempts, samples, seconds = (column[offset : offset + len(lines)] for column in self._steps[number])
        attempt = int(lines[0, 1])
        self.num_lost += int((attempts > 0).sum())
        # By attempt, not by place: a leader that was cut off may write its last lines after its successor's first ones.
        holds = attempts <= attempt
        self.samples += int(lines[holds, 2].sum()) - int(samples[holds].sum())
        self.productive_s += float(lines[holds, 3].sum()) - float(seconds[holds].sum())
        attempts[holds] = attempt
        samples[holds] = lines[holds, 2]
        seconds[holds] = lines[holds, 3]
        self._add_times(attempt, lines)

    def _add_times(self, attempt: int, lines: NDArray[np.float64]) -> None:
        times_s = lines[:, 4]
        span = self.spans.setdefault(attempt, Span())
        first = int(times_s.argmin())
        if times_s[first] < span.first_s:
            span.first_s = float(times_s[first])
            span.first_step_s = float(lines[first, 3])
        span.last_s = max(span.last_s, float(times_s.max()))
        commands = np.searchsorted(self.starts_s, times_s, side="right") - 1
        for command in np.unique(commands).tolist():
            self._add_time(command, float(times_s[commands == command].max()))

    def add_event(self, time_s: float) -> None:
        """Add the time of something else that a command has done."""
        self._add_time(bisect_right(self.starts_s, time_s) - 1, time_s)

    def _add_time(self, command: int, time_s: float) -> None:
        if command >= 0:
            self.ends_s[command] = max(self.ends_s[command], time_s)


def _numbers(block: bytes, names: Sequence[str]) -> NDArray[np.float64]:
    """Return the numbers of these names in each line that has all of them, (lines, names); ints are exact to 2^53."""
    table: NDArray[np.float64] | None = None
    if len(block) >= _WORTH_AN_IMPORT_BYTES:
        table = _numbers_at_once(block, names)
    if table is None:
        rows: list[list[float]] = []
        for line in decode(block):
            row = [line.get(name, math.nan) for name in names]
            if all(is_number(value) for value in row):
                rows.append(row)
        table = np.array(rows, np.float64).reshape(-1, len(names))
    return table[np.isfinite(table).all(axis=1)]


def _numbers_at_once(block: bytes, names: Sequence[str]) -> NDArray[np.float64] | None:
    """Return them ten times as fast, NaN where a line has none; None if one of the lines is not what it should be."""
    import pyarrow
    from pyarrow import json as arrow

    schema = pyarrow.schema([(name, pyarrow.float64()) for name in names])
    options = arrow.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    try:
        # One thread, as a worker has one core.
        table = arrow.read_json(pyarrow.BufferReader(block), arrow.ReadOptions(use_threads=False), options)
    except (pyarrow.ArrowException, OSError):
        return None
    return np.column_stack([table.column(name).to_numpy() for name in names])
