"""Write and read the sample ledger of a run.

`steps.jsonl` has one line for every committed step, with the step's samples, shares, loss and times.
"""

import math
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from steadfast.plan import End, Microbatch, Plan, Shares, begin_of
from steadfast.run.directory import STEPS
from steadfast.storage import Store
from steadfast.storage.jsonl import decode, first_lines, is_number, last_lines, open_stream, read_blocks, read_lines


class NotFinite(NamedTuple):
    """A microbatch whose loss is not finite."""

    microbatch: Microbatch
    is_empty: bool  # whether the task counted no tokens or samples in the microbatch


@dataclass(frozen=True)
class StepStats:
    """Figures of a step that all ranks know.

    All ranks learn the figures after the same later step.
    """

    step: int
    loss: float  # mean over the global batch
    count: float  # divisor of the loss: tokens or samples; an int, unless the task's count is not finite
    grad_norm: float  # norm of the mean gradient over the global batch, before clipping
    num_samples: int
    samples_digest: int  # digest of all samples, an unsigned 64-bit integer
    finite: bool
    overflowed: bool = False  # whether fp16 gradients overflowed, so that the step changed no weights
    metrics: Mapping[str, float] = field(default_factory=dict)  # metrics of the task, mean over the global batch
    # This rank's microbatches with a loss that is not finite, if the step is not finite. Other ranks do not know them.
    suspects: tuple[NotFinite, ...] = ()
    weights: str = ""  # digest of the weights after the step, if one is due; only the leader knows the digest


ACTS = ("validation", "snapshot", "checkpoint")  # phases that training waits for between two steps


@dataclass(frozen=True)
class StepTimes:
    """Times of the leader since the end of the former step."""

    step_s: float
    ended_s: float  # Unix time
    data_s: float = 0.0  # part of `step_s` in which the leader waited for batches
    acts_s: Mapping[str, float] = field(default_factory=dict)  # seconds before the step, by name of `ACTS`


class Ledger:
    """Writer of the lines in `steps.jsonl`. Only the leader's ledger writes."""

    # Several attempts may write the same step. Lines are only appended, because a crash while a line is removed could
    # damage other lines. The line of the last attempt counts, and earlier lines are lost steps.
    def __init__(self, store: Store, attempt: int, plan: Plan, writes: bool) -> None:
        self._attempt = attempt
        self._plan = plan
        self._stream = open_stream(store, STEPS) if writes else None

    def commit(self, steps: Iterable[tuple[StepStats, StepTimes]]) -> None:
        """Write committed steps with the leader's times."""
        self._write([self._line(*each) for each in steps])

    def as_planned(self, step: int, samples_digest: int, weights: str = "") -> None:
        """Write a line from the plan alone, for a step without figures.

        The step was skipped, or the figures were lost with a worker. `weights` is the digest of the weights, "" if none
        is due.
        """
        start, stop = self._plan.positions(step)
        if step in self._plan.skip:
            # The samples are not used, but the step keeps their positions, so that other steps have the same samples.
            num_samples = 0
            mark: dict[str, Any] = {"skipped": True, "positions": (start, stop)}
        else:
            # Survivors hold the step's state, but the message with the loss was lost with a worker.
            num_samples = stop - start
            mark = {"confirmed": False}
        planned = StepStats(step, math.nan, 0, math.nan, num_samples, samples_digest, finite=True, weights=weights)
        self._write([{**self._line(planned, StepTimes(0.0, time.time())), "loss": None, **mark}])

    def _line(self, stats: StepStats, times: StepTimes) -> dict[str, Any]:
        line: dict[str, Any] = {
            "step": stats.step,
            "attempt": self._attempt,
            "world_size": len(self._plan.shares),
            "shares": _in_runs(self._plan.shares_at(stats.step)),
            "num_samples": stats.num_samples,
            "samples_digest": f"{stats.samples_digest:016x}",
            "loss": stats.loss,
            "step_s": round(times.step_s, 6),
            "time_s": round(times.ended_s, 4),
        }
        if stats.overflowed:
            line["overflow"] = True
        if stats.weights:
            line["weights"] = stats.weights
        # Most steps have no waits, and a run may have millions of lines, so short waits are left out.
        for name, seconds in {"data": times.data_s, **times.acts_s}.items():
            if seconds >= _SHORTEST_S:
                line[f"{name}_s"] = round(seconds, 4)
        return line

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if self._stream is not None:
            self._stream.write(lines)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()


def _in_runs(shares: Shares) -> list[int | tuple[int, int]]:
    """Return shares in a short form: `(count, share)` stands for neighbouring ranks with equal shares."""
    runs: list[int | tuple[int, int]] = []
    for share, ranks in groupby(shares):
        count = len(list(ranks))
        runs.append(share if count == 1 else (count, share))
    return runs


def read_shares(line: Mapping[str, Any]) -> list[int] | None:
    """Return the microbatches of each rank from a line of the ledger, None if it has none."""
    runs = line.get("shares")
    if not isinstance(runs, list):
        return None
    shares: list[int] = []
    for run in runs:
        match run:
            case int(share):
                shares.append(share)
            case [int(count), int(share)] if count <= _LARGEST_WORLD:
                shares += [share] * count
            case _:
                return None
    return shares


@dataclass(frozen=True)
class PastLosses:
    """Losses of a run, oldest first, for the detection of spikes.

    `first` has the losses of the run's first steps, and `recent` those before the step at which an attempt begins.
    """

    first: list[float] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)  # short or empty if many steps were repeated


def past_losses(store: Store, step: int) -> PastLosses:
    """Return the first and the last losses up to `step`."""
    return PastLosses(_losses(first_lines(store, STEPS), step), _losses(last_lines(store, STEPS), step))


def _losses(lines: Iterable[dict[str, Any]], last_step: int) -> list[float]:
    losses: dict[int, Any] = {line["step"]: line.get("loss") for line in lines if isinstance(line.get("step"), int)}
    found = []
    for step, loss in sorted(losses.items()):
        # A skipped step has no loss, and neither has a step with lost figures.
        if step <= last_step and is_number(loss) and math.isfinite(loss):
            found.append(loss)
    return found


def last_end(store: Store, global_size: int, ends: Sequence[End]) -> End:
    """Return the end of the ledger's highest step.

    The end has the number of the step and the position after its last sample, zeros for an empty ledger.

    Args:
        ends: known ends of the run, oldest first.
    """
    step, num_samples = 0, 0
    for line in read_lines(store, STEPS):
        # The line may belong to any attempt, because a later attempt may have repeated earlier steps. A skipped step
        # uses no samples but takes their positions, so its case comes first.
        match line:
            case {"step": int(found), "positions": [int(start), int(stop)]} if found >= step:
                step, num_samples = found, stop - start
            case {"step": int(found), "num_samples": int(found_samples)} if found >= step:
                step, num_samples = found, found_samples
    if not step:
        return End(0, 0)
    return End(step, begin_of(step, global_size, ends) + num_samples)


_COLUMNS = ("step", "attempt", "num_samples", "step_s", "time_s")
# Optional columns: a line without the column counts as 0.
_OPTIONAL = ("world_size", "data_s", *(f"{act}_s" for act in ACTS))
_CHUNK = 2**20  # steps in an array
# A step may be repeated, so these values of the valid line are kept for each step; 0 if the step has no line. A run may
# have millions of steps, so the values take only 12 bytes.
_STEP = np.dtype([("samples", np.uint32), ("step_s", np.float32), ("data_s", np.float32)])
# A smaller block is parsed by Python, because importing pyarrow takes longer than parsing the block.
_WORTH_AN_IMPORT_BYTES = 2**20
_SHORTEST_S = 1e-4  # shortest wait that is written
_LARGEST_WORLD = 2**21  # more ranks than any world has


class Holders:
    """Attempt that wrote the valid line of each step, for a ledger of any length.

    Several attempts may write a line of the same step. The line of the highest attempt is valid, not the last line:
    a disconnected leader may write its last lines after the first lines of its successor.
    """

    def __init__(self) -> None:
        # 0 for a step without a line
        self._chunks: defaultdict[int, NDArray[np.uint32]] = defaultdict(lambda: np.zeros(_CHUNK, np.uint32))

    def add(self, first_step: int, num_lines: int, attempt: int) -> NDArray[np.uint32]:
        """Record an attempt's lines of consecutive steps.

        Return the former holders of the steps, 0 for a new step.
        """
        former: list[NDArray[np.uint32]] = []
        step, end = first_step, first_step + num_lines
        while step < end:
            number, offset = divmod(step, _CHUNK)
            holders = self._chunks[number][offset : offset + end - step]
            former.append(holders.copy())
            np.maximum(holders, attempt, out=holders)
            step += len(holders)
        return np.concatenate(former)

    def holds(self, step: int, attempt: int) -> bool:
        """Return whether the line of this attempt is the valid line of the step."""
        chunk = self._chunks.get(step // _CHUNK)
        return chunk is not None and attempt > 0 and int(chunk[step % _CHUNK]) == attempt

    def steps(self) -> Iterator[int]:
        """Yield the steps that have a line, in ascending order."""
        for number, chunk in sorted(self._chunks.items()):
            yield from (np.flatnonzero(chunk) + number * _CHUNK).tolist()


def runs_of(steps: NDArray[np.int64], attempts: NDArray[Any]) -> Iterator[slice]:
    """Yield the slices with consecutive steps of one attempt within one chunk."""
    if not len(steps):
        return
    breaks = (np.diff(steps) != 1) | (np.diff(attempts) != 0) | (steps[1:] % _CHUNK == 0)
    bounds = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(steps)]
    for start, stop in pairwise(bounds):
        yield slice(start, stop)


@dataclass
class Span:
    """Time between the first and the last line of an attempt."""

    first_s: float = math.inf  # end of the first step
    first_step_s: float = 0.0  # duration of the first step
    last_s: float = -math.inf
    world_size: int = 0  # number of workers, 0 if no line has it
    productive_s: float = 0.0  # seconds in steps that were not repeated
    data_s: float = 0.0  # part of `productive_s` in which the leader waited for batches
    redone_s: float = 0.0  # seconds in lost steps
    acts_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ACTS, 0.0))


class Totals:
    """Sums over a ledger of any length, read block by block.

    Args:
        starts_s: times at which the commands of the run began, oldest first.

    Attributes:
        starts_s: the argument.
        samples: number of samples in valid lines.
        num_lost: number of lost steps.
        ends_s: last known time of each command; -inf if there is none.
        spans: span of each attempt.
    """

    def __init__(self, starts_s: Sequence[float] = ()) -> None:
        self.samples = 0
        self.num_lost = 0
        self.ends_s = [-math.inf] * len(starts_s)
        self.spans: dict[int, Span] = {}
        self.starts_s = list(starts_s)
        self._holders = Holders()
        self._chunks: dict[int, NDArray[np.void]] = {}

    @property
    def productive_s(self) -> float:
        """Return the seconds in steps that were not repeated."""
        return sum(span.productive_s for span in self.spans.values())

    @classmethod
    def read(cls, store: Store, starts_s: Sequence[float], mark: Callable[[], object] = lambda: None) -> Self:
        """Read a run's ledger. `mark` is called after each block."""
        totals = cls(starts_s)
        for block in read_blocks(store, STEPS):
            totals.add(numbers(block, _COLUMNS, _OPTIONAL))
            mark()
        return totals

    def add(self, lines: NDArray[np.float64]) -> None:
        """Add lines (lines, columns) in the order of the file."""
        # Lines with values outside of these ranges were not written by this program.
        lines = lines[((lines[:, :3] >= (1, 1, 0)) & (lines[:, :3] < 2**32)).all(axis=1)]
        lines = lines[(np.abs(lines) < 2**53).all(axis=1)]
        steps = lines[:, 0].astype(np.int64)
        for run in runs_of(steps, lines[:, 1]):
            self._add_run(int(steps[run.start]), lines[run])

    def _add_run(self, first_step: int, lines: NDArray[np.float64]) -> None:
        number, offset = divmod(first_step, _CHUNK)
        if number not in self._chunks:
            self._chunks[number] = np.zeros(_CHUNK, _STEP)
        # This is a view, so assignments to `known` change the chunk.
        known = self._chunks[number][offset : offset + len(lines)]
        attempt = int(lines[0, 1])
        span = self.spans.setdefault(attempt, Span())
        former = self._holders.add(first_step, len(lines), attempt)
        self.num_lost += int((former > 0).sum())
        holds = former <= attempt
        self._take_back(known[holds], former[holds])
        self.samples += int(lines[holds, 2].sum()) - int(known["samples"][holds].sum())
        span.productive_s += float(lines[holds, 3].sum())
        span.data_s += float(lines[holds, 6].sum())
        span.redone_s += float(lines[~holds, 3].sum())
        for name, column in (("samples", 2), ("step_s", 3), ("data_s", 6)):
            known[name][holds] = lines[holds, column]
        self._add_times(span, lines)

    def _take_back(self, steps: NDArray[np.void], attempts: NDArray[np.uint32]) -> None:
        """Move the seconds of steps that a later attempt repeated from productive to redone.

        Args:
            steps: times and samples of each step, from its former run.
            attempts: attempt of each step's former run, 0 for a step without one.
        """
        for attempt in np.unique(attempts[attempts > 0]).tolist():
            redone = steps[attempts == attempt]
            # A chunk has a million steps, whose sum would be inexact in the single precision of each step.
            seconds = float(redone["step_s"].sum(dtype=np.float64))
            span = self.spans[attempt]
            span.productive_s -= seconds
            span.redone_s += seconds
            # These seconds are a part of `seconds`, so they are in `redone_s` already.
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
        # A time before the first command gives -1. `_add_time` ignores it.
        commands = np.searchsorted(self.starts_s, times_s, side="right") - 1
        for command in np.unique(commands).tolist():
            self._add_time(command, float(times_s[commands == command].max()))

    def add_event(self, time_s: float) -> None:
        """Record that a command was alive at `time_s`."""
        self._add_time(bisect_right(self.starts_s, time_s) - 1, time_s)

    def _add_time(self, command: int, time_s: float) -> None:
        if command >= 0:
            self.ends_s[command] = max(self.ends_s[command], time_s)


def numbers(block: bytes, names: Sequence[str], optional: Sequence[str]) -> NDArray[np.float64]:
    """Return numbers from JSON lines as an array (lines, names + optional).

    Lines that lack one of `names` are left out. Ints are exact up to 2^53. A line without an optional number gets 0.
    """
    table: NDArray[np.float64] | None = None
    if len(block) >= _WORTH_AN_IMPORT_BYTES:
        table = _numbers_at_once(block, (*names, *optional))
    if table is None:
        rows: list[list[float]] = []
        for line in decode(block):
            row = [line.get(name, math.nan) for name in (*names, *optional)]
            if all(map(is_number, row)):
                rows.append(row)
        table = np.array(rows, np.float64).reshape(-1, len(names) + len(optional))
    # Both ways of parsing give NaN for a number that a line lacks.
    table = table[np.isfinite(table[:, : len(names)]).all(axis=1)]
    return np.nan_to_num(table, copy=False, nan=0.0, posinf=0.0, neginf=0.0)


def _numbers_at_once(block: bytes, names: Sequence[str]) -> NDArray[np.float64] | None:
    """Parse the lines with pyarrow, ten times as fast.

    Returns None if a line cannot be parsed.
    """
    import pyarrow
    from pyarrow import json as arrow

    schema = pyarrow.schema(dict.fromkeys(names, pyarrow.float64()))
    options = arrow.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    try:
        # A worker has one core, so pyarrow gets one thread.
        table = arrow.read_json(pyarrow.BufferReader(block), arrow.ReadOptions(use_threads=False), options)
    except (pyarrow.ArrowException, OSError):
        return None
    return np.column_stack([table.column(name).to_numpy() for name in names])
