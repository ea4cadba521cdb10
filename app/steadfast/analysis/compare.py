"""Compare the ledgers of two runs, and find the first step that differs.

Only results are compared: samples, losses and digests of weights. The number of workers, the number of attempts and
the speed may differ. Other workers or shares are reported, but do not count as a difference.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from heapq import merge
from itertools import groupby, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadfast.config import Change, Config, diff
from steadfast.errors import UsageError
from steadfast.run.directory import STEPS, RunDirectory
from steadfast.run.events import AttemptStarted
from steadfast.run.ledger import Holders, numbers, read_shares, runs_of
from steadfast.storage import Store
from steadfast.storage.jsonl import Line, decode, is_number, read_blocks

# Largest relative difference of two losses that counts as rounding, if workers summed in another order. Rounding is
# reported, but is not a difference.
ROUNDING = 1e-9
_LARGEST = 2**32  # larger than any step or attempt of a run

Both = tuple[Any, Any]  # values of the two runs, in the order of the arguments


@dataclass(frozen=True)
class Ran:
    """Attempt and workers that ran a step. Unrecorded values are None."""

    attempt: int
    world_size: int | None
    shares: list[int] | None  # microbatches by rank
    nodes: dict[str, list[int]] | None  # ranks by node


@dataclass(frozen=True)
class Difference:
    """First step in which two runs differ."""

    step: int
    values: Mapping[str, Both]  # by the name of what differs
    ran: tuple[Ran | None, Ran | None] = (None, None)


@dataclass
class Comparison:
    """Result of comparing two ledgers.

    The comparison ends with the last step of the shorter ledger.

    Attributes:
        last_steps: last step of each run.
        steps: number of steps that are in both ledgers.
        unconfirmed: number of steps whose results were lost with a worker in either run. Their loss is unknown.
        losses: number of steps whose loss is known in both runs.
        rounded: number of losses that differ by rounding only.
        rounded_since: the first step whose loss differs by rounding.
        largest_rounding: the largest relative difference by rounding.
        shared_otherwise: the first step with other workers or other shares; None if there is none.
        weights: number of compared digests of weights.
        weights_same: the last step with equal digests before the first unequal ones; None if there is none.
        weights_differ: the first step with unequal digests of weights.
        ends: digests of the final states, if both runs ended after the same step.
        first: the first difference, None if there is none.
        changes: differing keys of the configurations that can change results.
    """

    last_steps: tuple[int, int]
    steps: int = 0
    unconfirmed: int = 0
    losses: int = 0
    rounded: int = 0
    rounded_since: int | None = None
    largest_rounding: float = 0.0
    shared_otherwise: int | None = None
    weights: int = 0
    weights_same: int | None = None
    weights_differ: int | None = None
    ends: dict[str, Both] = field(default_factory=dict)
    first: Difference | None = None
    changes: list[Change] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Return whether no difference was found, and both runs have the same last step."""
        return self.first is None and self.last_steps[0] == self.last_steps[1]

    def to_line(self) -> Line:
        """Return the result as a JSON object for scripts."""
        found = asdict(self) | {"last_steps": list(self.last_steps)}
        keys = [{"key": each.key, "a": each.old, "b": each.new, "identity": each.identity} for each in self.changes]
        return {"same": self.same, **found, "changes": keys}

    def add(self, step: int, lines: tuple[Line | None, Line | None]) -> None:
        """Compare the next step that has a line in at least one ledger."""
        ours, theirs = lines
        if ours is None or theirs is None:
            self._note(step, {"line": (ours is not None, theirs is not None)}, lines)
            return
        self.steps += 1
        if self.shared_otherwise is None and _shared(ours) != _shared(theirs):
            self.shared_otherwise = step
        # A line has this key only if the results of its step were lost.
        is_confirmed = ours.get("confirmed") is not False and theirs.get("confirmed") is not False
        self.unconfirmed += not is_confirmed
        values = _samples(ours, theirs)
        # The flag of an overflow was lost together with the other results.
        if is_confirmed:
            values |= _flag("overflow", ours, theirs)
        self._add_loss(step, (ours.get("loss"), theirs.get("loss")), values)
        self._add_weights(step, (ours.get("weights"), theirs.get("weights")), values)
        self._note(step, values, lines)

    def _add_loss(self, step: int, losses: Both, values: dict[str, Both]) -> None:
        if not (is_number(losses[0]) and is_number(losses[1])):
            return
        self.losses += 1
        relative = relative_difference(*losses)
        if not relative:
            return
        # If the same ranks ran the same shares in all steps so far, losses must be equal to the bit.
        if self.shared_otherwise is None or relative > ROUNDING:
            values["loss"] = losses
            return
        self.rounded += 1
        self.largest_rounding = max(self.largest_rounding, relative)
        if self.rounded_since is None:
            self.rounded_since = step

    def _add_weights(self, step: int, digests: Both, values: dict[str, Both]) -> None:
        # The runs may have recorded their digests at different steps.
        if not all(digests):
            return
        self.weights += 1
        if digests[0] != digests[1]:
            values["weights"] = digests
            self.weights_differ = self.weights_differ or step
        elif self.weights_differ is None:
            self.weights_same = step

    def _note(self, step: int, values: dict[str, Both], lines: tuple[Line | None, Line | None]) -> None:
        if values and self.first is None:
            self.first = Difference(step, values, (_ran(lines[0]), _ran(lines[1])))


def compare(one: RunDirectory, other: RunDirectory) -> Comparison:
    """Compare two runs up to the last step of the shorter run.

    Raises:
        UsageError: the runs have no step in common.
    """
    ledgers = HeldLines(one.store), HeldLines(other.store)
    found = Comparison(last_steps=(ledgers[0].last, ledgers[1].last))
    last_lines: tuple[Line | None, Line | None] = (None, None)
    for step, lines in _paired(ledgers, min(found.last_steps)):
        found.add(step, lines)
        last_lines = lines
    if not found.steps:
        come = f"{one.uri} has reached step {found.last_steps[0]}, {other.uri} step {found.last_steps[1]}"
        raise UsageError(f"no step is in both ledgers, so there is nothing to compare: {come}")
    found.ends = _ends(one, other)
    parted = {name: both for name, both in found.ends.items() if both[0] != both[1]}
    # Digests of the final states are in no ledger line, so they count after the last step.
    if parted and found.first is None:
        found.first = Difference(min(found.last_steps), parted, (_ran(last_lines[0]), _ran(last_lines[1])))
    # Only the first difference needs its nodes, and reading them goes through all events of a run.
    if found.first is not None:
        ours, theirs = found.first.ran
        found.first = replace(found.first, ran=(_on_nodes(one, ours), _on_nodes(other, theirs)))
    found.changes = _changes(one, other)
    return found


class HeldLines:
    """Valid lines of a ledger, in the order of steps.

    A step has one valid line. The ledger may have any length, because it is read in blocks.

    Attributes:
        last: the highest step, 0 if there is none.
    """

    # The ledger is read twice, because a line does not show whether a later attempt did its step again.
    def __init__(self, store: Store) -> None:
        self._store = store
        self._holders = Holders()
        self.last = 0
        for block in read_blocks(store, STEPS):
            self._learn(numbers(block, ("step", "attempt"), ()))

    def _learn(self, lines: NDArray[np.float64]) -> None:
        # Lines with other numbers were not written by this program.
        lines = lines[((lines >= 1) & (lines < _LARGEST) & (lines % 1 == 0)).all(axis=1)]
        steps, attempts = lines.astype(np.int64).T
        for run in runs_of(steps, attempts):
            self._holders.add(int(steps[run.start]), run.stop - run.start, int(attempts[run.start]))
        self.last = max(self.last, int(steps.max(initial=0)))

    def __iter__(self) -> Iterator[Line]:
        # Later steps wait here for earlier ones, which a disconnected leader may write last.
        waiting: dict[int, Line] = {}
        steps = self._holders.steps()
        expected = next(steps, _LARGEST)
        for block in read_blocks(self._store, STEPS):
            for line in decode(block):
                if self._holds(line) and line["step"] >= expected:
                    waiting[line["step"]] = line
                while expected in waiting:
                    yield waiting.pop(expected)
                    expected = next(steps, _LARGEST)

    def _holds(self, line: Line) -> bool:
        step, attempt = line.get("step"), line.get("attempt")
        # `isinstance` would accept true and false, which JSON may contain.
        return type(step) is int and type(attempt) is int and self._holders.holds(step, attempt)


def relative_difference(one: float, other: float) -> float:
    """Return the difference of two numbers as a share of the larger one.

    The result is 0 for equal numbers and for two NaN, and infinite if only one number is NaN.
    """
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    relative = abs(one - other) / max(abs(one), abs(other))
    # Infinity divided by infinity is NaN too, and every comparison with NaN would be false.
    if math.isnan(relative):
        return math.inf
    return relative


def _paired(ledgers: tuple[HeldLines, HeldLines], last: int) -> Iterator[tuple[int, tuple[Line | None, Line | None]]]:
    """Yield each step up to `last` with its line in each ledger."""
    ours, theirs = (zip(repeat(place), lines) for place, lines in enumerate(ledgers))
    for step, found in groupby(merge(ours, theirs, key=_step), key=_step):
        if step > last:
            return
        lines = dict(found)
        yield step, (lines.get(0), lines.get(1))


def _step(line: tuple[int, Line]) -> int:
    return int(line[1]["step"])


def _samples(ours: Line, theirs: Line) -> dict[str, Both]:
    """Return the differences in the samples of a step."""
    if skipped := _flag("skipped", ours, theirs):
        return skipped  # the number of samples differs as well, but adds no information
    values: dict[str, Both] = {}
    for name in ("num_samples", "samples_digest"):
        both = ours.get(name), theirs.get(name)
        if both[0] != both[1]:
            values[name] = both
    return values


def _flag(name: str, ours: Line, theirs: Line) -> dict[str, Both]:
    both = bool(ours.get(name)), bool(theirs.get(name))
    return {name: both} if both[0] != both[1] else {}


def _shared(line: Line) -> Both:
    return line.get("world_size"), read_shares(line)


def _ran(line: Line | None) -> Ran | None:
    if line is None:
        return None
    return Ran(line["attempt"], line.get("world_size"), read_shares(line), None)


def _on_nodes(directory: RunDirectory, ran: Ran | None) -> Ran | None:
    """Return `ran` with its attempt's ranks by node, if known."""
    if ran is None:
        return None
    for event in directory.events(AttemptStarted):
        if event.attempt == ran.attempt and event.nodes is not None:
            nodes = {node: list(ranks) for node, ranks in event.nodes.items()}
            return replace(ran, nodes=nodes)
    return ran


def _ends(one: RunDirectory, other: RunDirectory) -> dict[str, Both]:
    """Return the digests of both final states, if both runs ended after the same step."""
    ours, theirs = one.summary(), other.summary()
    if ours is None or theirs is None or ours["step"] != theirs["step"]:
        return {}
    return {name: (ours[name], theirs[name]) for name in ours if name.endswith("_sha256") and name in theirs}


def _changes(one: RunDirectory, other: RunDirectory) -> list[Change]:
    ours, theirs = config_of(one), config_of(other)
    if ours is None or theirs is None:
        return []
    return [change for change in diff(ours, theirs) if change.numeric]


def config_of(directory: RunDirectory) -> Config | None:
    """Return the configuration of a run, with its measured microbatch size."""
    config = directory.stored_config()
    return config and config.replace("batch", directory.batch(config.batch))
