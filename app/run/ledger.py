"""The sample ledger: one line for every committed step, and what the lines say together."""

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from app.plan import End, Microbatch, Plan, begin_of
from app.run.directory import STEPS
from app.storage import Store
from app.storage.jsonl import decode, first_lines, is_number, last_lines, open_stream, read_blocks, read_lines


class NotFinite(NamedTuple):
    """A microbatch whose loss is not finite."""

    microbatch: Microbatch
    is_empty: bool  # the task has counted nothing in it


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
    overflowed: bool = False  # its gradients have, in fp16, and updated nothing
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the task, mean over the global batch
    # Known to this rank alone: its microbatches whose loss is not finite, in a step that is not.
    suspects: tuple[NotFinite, ...] = ()
    weights: str = ""  # digest of the weights after the step, where one is due; known to the leader alone


ACTS = ("validation", "snapshot", "checkpoint")  # phases that training waits for between two steps


@dataclass(frozen=True)
class StepTimes:
    """Where the leader's time went from the end of the step before to the end of this one."""

    step_s: float
    ended_s: float  # Unix time
    data_s: float = 0.0  # of `step_s`, waiting for batches
    acts_s: Mapping[str, float] = field(default_factory=dict)  # by name of `ACTS`, before the step


class Ledger:
    """Appends to `steps.jsonl` what all ranks are known to have finished. Only the leader's ledger writes."""

    # Several attempts may have written the same step: lines are only ever appended, since a crash while one is taken
    # back could cost others. The last attempt's line holds, the others are lost steps.
    def __init__(self, store: Store, attempt: int, plan: Plan, writes: bool) -> None:
        self._attempt = attempt
        self._plan = plan
        self._stream = open_stream(store, STEPS) if writes else None

    def commit(self, steps: Iterable[tuple[StepStats, StepTimes]]) -> None:
        """Write steps down, each with the times of the leader."""
        self._write([self._line(*each) for each in steps])

    def as_planned(self, step: int, samples_digest: int, weights: str = "") -> None:
        """Write down what the plan says of a step of which no message told, with the digest of the weights, if any."""
        start, stop = self._plan.positions(step)
        if step in self._plan.skip:
            num_samples = 0
            mark: dict[str, Any] = {"skipped": True, "positions": (start, stop)}
        else:
            # Survivors hold it complete, but its message, with the loss, died with a worker.
            num_samples = stop - start
            mark = {"confirmed": False}
        planned = StepStats(step, math.nan, 0, math.nan, num_samples, samples_digest, finite=True, weights=weights)
        self._write([{**self._line(planned, StepTimes(0.0, time.time())), "loss": None, **mark}])

    def _line(self, stats: StepStats, times: StepTimes) -> dict[str, Any]:
        waits_s = {"data_s": times.data_s} | {f"{act}_s": seconds for act, seconds in times.acts_s.items()}
        return {
            "step": stats.step,
            "attempt": self._attempt,
            "world_size": len(self._plan.shares),
            "shares": self._plan.shares_at(stats.step),
            "num_samples": stats.num_samples,
            "samples_digest": f"{stats.samples_digest:016x}",
            "loss": stats.loss,
            "step_s": round(times.step_s, 6),
            "time_s": round(times.ended_s, 4),
            **({"overflow": True} if stats.overflowed else {}),
            **({"weights": stats.weights} if stats.weights else {}),
            # Of most steps there are none, and a run has millions.
            **{name: round(seconds, 4) for name, seconds in waits_s.items() if seconds >= _SHORTEST_S},
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


def last_end(store: Store, global_size: int, ends: Sequence[End]) -> End:
    """Return the highest step of the ledger, and the position behind its last sample; zeros for an empty ledger.

    Args:
        ends: the ends of the run that are known, oldest first.
    """
    step, num_samples = 0, 0
    for line in read_lines(store, STEPS):
        # In whichever attempt: the last line may be of one that did earlier steps again.
        match line:
            case {"step": int(found), "positions": [int(start), int(stop)]} if found >= step:  # it was left out
                step, num_samples = found, stop - start
            case {"step": int(found), "num_samples": int(found_samples)} if found >= step:
                step, num_samples = found, found_samples
    if not step:
        return End(0, 0)
    return End(step, begin_of(step, global_size, ends) + num_samples)


def read_ledger(store: Store) -> History:
    """Return all that the ledger says. Of a long run that is more than fits into memory; see `Totals`."""
    return History(list(read_lines(store, STEPS)))


_COLUMNS = ("step", "attempt", "num_samples", "step_s", "time_s")
# A line may lack these, and 0 stands for them.
_OPTIONAL = ("world_size", "data_s", *(f"{act}_s" for act in ACTS))
_CHUNK = 2**20  # steps
# All that is kept of a step, since it may be done again: of the line that holds, 0 where there is none.
_STEP = np.dtype([("attempt", np.uint32), ("samples", np.uint32), ("step_s", np.float32), ("data_s", np.float32)])
_WORTH_AN_IMPORT_BYTES = 2**20
_SHORTEST_S = 1e-4  # that is written down of a wait


@dataclass
class Span:
    """The time in which an attempt has written to the ledger."""

    first_s: float = math.inf  # when its first step ended
    first_step_s: float = 0.0  # how long that took
    last_s: float = -math.inf
    world_size: int = 0  # 0 where no line says so
    productive_s: float = 0.0  # in steps that hold
    data_s: float = 0.0  # of `productive_s`, waiting for batches
    redone_s: float = 0.0  # in steps that were done again
    acts_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ACTS, 0.0))


class Totals:
    """What a ledger comes to, read line by line: it may be of any length.

    Args:
        starts_s: when the commands of the run began, oldest first.

    Attributes:
        starts_s: as given.
        samples: of the steps that hold.
        num_lost: lines whose step was done again.
        ends_s: the last time that is known of each command; -inf if there is none.
        spans: by attempt.
    """

    def __init__(self, starts_s: Sequence[float] = ()) -> None:
        self.samples = 0
        self.num_lost = 0
        self.ends_s = [-math.inf] * len(starts_s)
        self.spans: dict[int, Span] = {}
        self.starts_s = list(starts_s)
        self._chunks: dict[int, NDArray[np.void]] = {}

    @property
    def productive_s(self) -> float:
        """Return the seconds in steps that hold."""
        return sum(span.productive_s for span in self.spans.values())

    @classmethod
    def read(cls, store: Store, starts_s: Sequence[float], mark: Callable[[], object] = lambda: None) -> Self:
        """Read a run's ledger. `mark` is called again and again meanwhile."""
        totals = cls(starts_s)
        for block in read_blocks(store, STEPS):
            totals.add(numbers(block, _COLUMNS, _OPTIONAL))
            mark()
        return totals

    def add(self, lines: NDArray[np.float64]) -> None:
        """Add lines, (lines, columns), in the order in which they were written."""
        # Others are not of our writing.
        lines = lines[((lines[:, :3] >= (1, 1, 0)) & (lines[:, :3] < 2**32)).all(axis=1)]
        lines = lines[(np.abs(lines) < 2**53).all(axis=1)]
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
        if number not in self._chunks:
            self._chunks[number] = np.zeros(_CHUNK, _STEP)
        known = self._chunks[number][offset : offset + len(lines)]
        attempt = int(lines[0, 1])
        span = self.spans.setdefault(attempt, Span())
        self.num_lost += int((known["attempt"] > 0).sum())
        # By attempt, not by place: a leader that was cut off may write its last lines after its successor's first ones.
        holds = known["attempt"] <= attempt
        self._take_back(known[holds])
        self.samples += int(lines[holds, 2].sum()) - int(known["samples"][holds].sum())
        span.productive_s += float(lines[holds, 3].sum())
        span.data_s += float(lines[holds, 6].sum())
        span.redone_s += float(lines[~holds, 3].sum())
        for name, column in (("samples", 2), ("step_s", 3), ("data_s", 6)):
            known[name][holds] = lines[holds, column]
        known["attempt"][holds] = attempt
        self._add_times(span, lines)

    def _take_back(self, steps: NDArray[np.void]) -> None:
        """Count steps of earlier attempts as done again."""
        for attempt in np.unique(steps["attempt"][steps["attempt"] > 0]).tolist():
            redone = steps[steps["attempt"] == attempt]
            seconds = float(redone["step_s"].sum(dtype=np.float64))
            span = self.spans[attempt]
            span.productive_s -= seconds
            span.redone_s += seconds
            span.data_s -= float(redone["data_s"].sum(dtype=np.float64))

    def _add_times(self, span: Span, lines: NDArray[np.float64]) -> None:
        times_s = lines[:, 4]
        first = int(times_s.argmin())
        if times_s[first] < span.first_s:
            span.first_s = float(times_s[first])
            span.first_step_s = float(lines[first, 3])
        span.last_s = max(span.last_s, float(times_s.max()))
        span.world_size = max(span.world_size, int(lines[:, 5].max()))
        for act, seconds in zip(ACTS, lines[:, 7:].sum(axis=0).tolist(), strict=True):
            span.acts_s[act] += seconds
        commands = np.searchsorted(self.starts_s, times_s, side="right") - 1
        for command in np.unique(commands).tolist():
            self._add_time(command, float(times_s[commands == command].max()))

    def add_event(self, time_s: float) -> None:
        """Add the time of something else that a command has done."""
        self._add_time(bisect_right(self.starts_s, time_s) - 1, time_s)

    def _add_time(self, command: int, time_s: float) -> None:
        if command >= 0:
            self.ends_s[command] = max(self.ends_s[command], time_s)


def numbers(block: bytes, names: Sequence[str], optional: Sequence[str]) -> NDArray[np.float64]:
    """Return the numbers of these names in each line that has all of `names`, (lines, names + optional).

    Ints are exact to 2^53, and 0 stands for an optional one that a line lacks.
    """
    table: NDArray[np.float64] | None = None
    if len(block) >= _WORTH_AN_IMPORT_BYTES:
        table = _numbers_at_once(block, (*names, *optional))
    if table is None:
        rows: list[list[float]] = []
        for line in decode(block):
            row = [line.get(name, math.nan) for name in (*names, *optional)]
            if all(is_number(value) for value in row):
                rows.append(row)
        table = np.array(rows, np.float64).reshape(-1, len(names) + len(optional))
    table = table[np.isfinite(table[:, : len(names)]).all(axis=1)]
    return np.nan_to_num(table, copy=False, nan=0.0, posinf=0.0, neginf=0.0)


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
