"""Gather the data of the report from a run's files.

Curves of long runs are thinned out to the number of points that a person can see.
"""

import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, Self

import numpy as np

from steadfast.analysis.compare import HeldLines
from steadfast.run import events
from steadfast.run.directory import METRICS, RunDirectory
from steadfast.run.ledger import Totals
from steadfast.storage.jsonl import is_count, is_number, read_lines
from steadfast.telemetry.goodput import TimeLedger, read_totals
from steadfast.telemetry.interruptions import Interruption, read_interruptions

_MOST_POINTS = 3000  # points of one curve
_MOST_EVENTS = 1000  # events of one kind
_CURVES = ("loss", "lr", "grad_norm", "step_ms", "data_wait", "units_per_s")
METRIC = "metrics."  # before the name of a metric among the figures of a log step


class Curve:
    """Figures by step, thinned out on the way.

    If a step was done again, its last figures count.
    """

    def __init__(self, most_points: int = _MOST_POINTS) -> None:
        self._most_points = most_points
        self._stride = 1
        self._num_seen = 0
        self.steps: list[int] = []
        self.rows: list[dict[str, float]] = []

    def add(self, step: int, row: dict[str, float]) -> None:
        """Add the figures of a step, and drop the figures of this and of later steps."""
        # Figures come in the order of time. So a step that is not the highest belongs to a later attempt, which does
        # the following steps again too.
        again = bisect_left(self.steps, step)
        del self.steps[again:], self.rows[again:]
        self._num_seen += 1
        if self._num_seen % self._stride:
            return
        self.steps.append(step)
        self.rows.append(row)
        # Half of the points go at once, so that the rest stays evenly spaced over the whole run.
        if len(self.steps) > self._most_points:
            del self.steps[::2], self.rows[::2]
            self._stride *= 2

    def column(self, name: str) -> list[float]:
        """Return one figure of each step, NaN if unknown."""
        return [row.get(name, float("nan")) for row in self.rows]


@dataclass(frozen=True)
class Trace:
    """Values by step, thinned out to the least and the largest value of each of many intervals.

    `means` has the mean of each point's interval, which is smoother than the extremes, and is not pulled up by peaks.
    """

    steps: list[int]
    values: list[float]
    means: list[float]

    @classmethod
    def of(cls, steps: Sequence[int], values: Sequence[float], most_points: int = _MOST_POINTS) -> Self:
        """Return the trace of finite values. A short trace keeps all values."""
        if len(steps) <= most_points:
            return cls(list(steps), list(values), list(values))
        trace = cls([], [], [])
        bounds = np.linspace(0, len(steps), most_points // 2 + 1, dtype=int).tolist()
        for start, stop in pairwise(bounds):
            part = np.asarray(values[start:stop])
            # A spike of one step, which every second point would miss, is an extreme of its interval.
            for place in sorted({int(part.argmin()), int(part.argmax())}):
                trace.steps.append(steps[start + place])
                trace.values.append(values[start + place])
                trace.means.append(float(part.mean()))
        return trace


@dataclass(frozen=True)
class Rank:
    """Time that a rank spent by itself in the steps of an attempt."""

    attempt: int
    rank: int
    node: str  # "" if unknown
    gpu: str  # "" on CPUs
    own_ms: float  # mean of one step
    of_median: float  # `own_ms` divided by the median of the attempt's ranks
    last: float  # share of the checks in which other ranks waited longest for this rank, 0 to 1


@dataclass
class Course:
    """Data of a run that the report shows."""

    directory: RunDirectory
    totals: Totals
    ledger: TimeLedger
    interruptions: list[Interruption]
    figures: Curve = field(default_factory=Curve)
    validations: Curve = field(default_factory=Curve)
    told: dict[type[events.Event], list[Any]] = field(default_factory=dict)  # the events that the page needs, by kind

    @classmethod
    def read(cls, directory: RunDirectory) -> Self:
        """Read the data of a run from its directory."""
        totals = read_totals(directory)
        redone_s = {attempt: span.redone_s for attempt, span in totals.spans.items()}
        interruptions = read_interruptions(directory.all_events(), redone_s)
        course = cls(directory, totals, TimeLedger(totals, directory.all_events()), interruptions)
        for event in directory.all_events():
            course._learn(event)
        for line in read_lines(directory.store, METRICS):
            course._add_figures(line)
        return course

    def _learn(self, event: events.Event) -> None:
        if isinstance(event, events.Validation):
            # Validations need no limit here, because a curve limits its points itself.
            self.validations.add(event.step, dict(event.metrics))
        elif len(self.told.setdefault(type(event), [])) < _MOST_EVENTS:
            self.told[type(event)].append(event)

    def _add_figures(self, line: dict[str, Any]) -> None:
        # Lines of a damaged file may have any content.
        if not is_count(line.get("step")):
            return
        row = {name: float(line[name]) for name in _CURVES if is_number(line.get(name))}
        metrics = line.get("metrics")
        if isinstance(metrics, dict):
            for name, value in metrics.items():
                if is_number(value):
                    row[METRIC + name] = float(value)
        self.figures.add(line["step"], row)

    def losses(self) -> Trace:
        """Return the loss of every step, read from the ledger."""
        # A run may have millions of steps, so the numbers are kept in arrays.
        steps, values = array("q"), array("d")
        for line in HeldLines(self.directory.store):
            loss = line.get("loss", math.nan)
            # A skipped step has no loss, and neither has a step with lost figures. A loss of NaN cannot be drawn.
            if is_number(loss) and math.isfinite(loss):
                steps.append(line["step"])
                values.append(loss)
        return Trace.of(steps, values)

    def metrics(self) -> list[str]:
        """Return the names of the metrics of training and validation, without the loss."""
        names: dict[str, None] = {}
        for row in self.figures.rows:
            for name in row:
                if name.startswith(METRIC):
                    names[name.removeprefix(METRIC)] = None
        for row in self.validations.rows:
            names |= dict.fromkeys(row)
        names.pop("loss", None)
        return list(names)

    def starts(self) -> dict[int, events.AttemptStarted]:
        """Return the start of each attempt that has finished a step."""
        return {event.attempt: event for event in self.told.get(events.AttemptStarted, [])}

    def ranks(self) -> list[Rank]:
        """Return the times of each attempt's ranks, in the order of attempts and ranks."""
        told: dict[int, list[events.RankTimes]] = {}
        for event in self.told.get(events.RankTimes, []):
            told.setdefault(event.attempt, []).append(event)
        starts = self.starts()
        found: list[Rank] = []
        for attempt, times in told.items():
            found += _ranks(attempt, times, starts.get(attempt))
        return found


def _ranks(attempt: int, told: list[events.RankTimes], start: events.AttemptStarted | None) -> list[Rank]:
    nodes: dict[int, str] = {}
    gpus: tuple[str, ...] = ()
    if start is not None:
        gpus = start.gpus or ()
        for node, ranks in (start.nodes or {}).items():
            nodes.update(dict.fromkeys(ranks, node))
    num_steps = num_looks = 0
    for event in told:
        num_steps += event.num_steps
        num_looks += sum(event.last)
    own_ms = []
    for rank in range(len(told[0].own_ms)):
        # Later events cover more steps, so a mean without weights would depend mostly on the first seconds.
        own_ms.append(sum(event.own_ms[rank] * event.num_steps for event in told) / (num_steps or 1))
    # Without any measured time the shares of the median are 0, instead of a division by 0.
    typical_ms = median(own_ms) or math.inf
    found = []
    for rank, each_ms in enumerate(own_ms):
        last = sum(event.last[rank] for event in told) / (num_looks or 1)
        gpu = gpus[rank] if gpus else ""
        found.append(Rank(attempt, rank, nodes.get(rank, ""), gpu, each_ms, each_ms / typical_ms, last))
    return found
