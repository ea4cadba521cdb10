"""Prove from a run's ledger that the run used its planned samples.

The proof covers each step once and each training sample once per epoch. It trains nothing and reads no samples: the
samples of a step follow from the seed, the length of the dataset and `data.order`, or the orders of a mixture's
sources. An order function of the user is called to compute them. Such an order may read a sample several times in an
epoch, so the audit does not check that.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from steadfast.config import Config, DataConfig, MixtureData, RunConfig, Target
from steadfast.data.order import Extent, Int64s, MixtureOrder, SampleOrder, UInt64s, build_order, sample_keys
from steadfast.errors import SteadfastError, UsageError
from steadfast.plan import Plan, step_of
from steadfast.run.directory import STEPS, RunDirectory
from steadfast.run.events import AttemptStarted, Rollback
from steadfast.run.ledger import Holders
from steadfast.storage.jsonl import Line, decode, read_blocks

# Number of samples that are ordered at once. Otherwise memory would grow with the global batch.
_PIECE = 2**18
_LARGEST = 2**32  # larger than any step or attempt of a run


class CounterExample(SteadfastError):
    """First place where a ledger contradicts the plan."""

    def __init__(self, step: int, expected: str, found: str, meaning: str) -> None:
        super().__init__(f"step {step}: expected {expected}, found {found}: {meaning}")
        self.step = step
        self.expected = expected
        self.found = found
        self.meaning = meaning

    def to_line(self) -> Line:
        return {"step": self.step, "expected": self.expected, "found": self.found, "meaning": self.meaning}


@dataclass(frozen=True)
class Proof:
    """Numbers of a proof.

    Attributes:
        steps: number of proved steps, from 1 on. Each step has one valid line.
        samples: number of samples that these steps used.
        epochs: number of finished passes over the training samples.
        epoch_samples: number of training samples of the dataset. Each appears once in an epoch.
        digests: number of lines whose digest, summed up by the workers, was compared with the plan's digest.
        redone: number of lines whose step was done again by a later attempt.
        unconfirmed: number of steps whose results were lost with a worker. Their digest comes from the plan.
        left_out: number of steps that rollbacks left out.
        left_out_samples: number of samples of the steps that rollbacks left out.
        source_samples: number of samples of each source of a mixture, those of left-out steps included. It is the
            source's share of all, to within one sample.
    """

    steps: int
    samples: int
    epochs: int
    epoch_samples: int
    digests: int
    redone: int
    unconfirmed: int
    left_out: int
    left_out_samples: int
    source_samples: tuple[int, ...] = ()

    def to_line(self) -> Line:
        return asdict(self)


def audit(directory: RunDirectory, config: Config, extent: Extent | int) -> Proof:
    """Prove that the run used each sample as planned.

    Args:
        directory: the run to audit.
        config: the configuration of the run.
        extent: of the dataset. The number of samples, held-out ones included, is enough as for `build_order`.

    Raises:
        CounterExample: the ledger contradicts the plan.
        UsageError: the run has no steps yet.
        ConfigError: an order names code that cannot be loaded on this machine.
    """
    auditor = _Auditor(directory, config.run, config.data, config.batch.global_size, extent)
    for block in read_blocks(directory.store, STEPS):
        for piece in _pieces(decode(block), max(1, _PIECE // config.batch.global_size)):
            auditor.add(piece)
    return auditor.proof((directory.summary() or {}).get("step", 0))


def _pieces(lines: list[Line], num_lines: int) -> Iterator[list[Line]]:
    """Yield lists of ledger lines: consecutive steps of one attempt.

    A list has at most `num_lines` lines. Lines without a step or an attempt are left out.
    """
    piece: list[Line] = []
    for line in lines:
        # A truncated or foreign line counts as missing. The check for missing steps reports its step.
        if not (_is_count(line.get("step")) and _is_count(line.get("attempt"))):
            continue
        follows = piece and line["attempt"] == piece[-1]["attempt"] and line["step"] == piece[-1]["step"] + 1
        if piece and (not follows or len(piece) == num_lines):
            yield piece
            piece = []
        piece.append(line)
    if piece:
        yield piece


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value < _LARGEST


class _Auditor:
    """Compares ledger lines with the plan, in the order of the file."""

    def __init__(
        self, directory: RunDirectory, run: RunConfig, data: DataConfig, global_size: int, extent: Extent | int
    ) -> None:
        self._directory = directory
        self._seed = run.seed
        self._order = build_order(data, extent, run.seed)
        end = run.num_samples(self._order.num_train)
        ends = directory.amendments().ends
        # Ranks and microbatches do not matter, because the audit only asks for the samples of whole steps.
        self._plan = Plan(global_size, global_size, (1,), num_samples=end, ends=ends)
        _check_ends(self._plan, self._order.num_train)
        self._num_steps = _LARGEST
        if end:
            self._num_steps = run.num_steps(self._order.num_train, global_size, ends)
        self._epochs = _Epochs(self._order, self._seed, self._plan, _once(data.order))
        if isinstance(self._order, MixtureOrder) and isinstance(data, MixtureData):
            once = [_once(source.order) for source in data.sources]
            self._epochs = _MixtureEpochs(self._order, self._seed, self._plan, once)
        self._left_out = _left_out(directory)
        self._first = {event.attempt: event.step + 1 for event in directory.events(AttemptStarted)}
        self._last: dict[int, int] = {}  # newest step by attempt
        self._holders = Holders()
        self._num_lines = 0
        self._num_reported = 0
        self._unconfirmed: dict[int, int] = {}  # attempt by step
        self._skipped: dict[int, int] = {}  # attempt by step

    def add(self, lines: list[Line]) -> None:
        """Check lines of consecutive steps of one attempt.

        Raises:
            CounterExample: a line contradicts the plan.
        """
        first, last, attempt = lines[0]["step"], lines[-1]["step"], lines[0]["attempt"]
        self._check_follows(first, attempt)
        if last > self._num_steps:
            meaning = "the ledger continues after the end of the last epoch"
            raise CounterExample(self._num_steps + 1, f"no step after {self._num_steps}", f"step {last}", meaning)
        start, stop = self._plan.positions(first)[0], self._plan.positions(last)[1]
        positions = np.arange(start, stop)
        ids = self._order.train(positions)
        keys = sample_keys(ids, positions, self._seed)
        # The digest of a step is the sum of its samples' keys. `reduceat` wants the index of each step's first sample.
        counts = np.array([self._plan.num_samples_in(line["step"]) for line in lines])
        sums = np.add.reduceat(keys, np.cumsum(counts) - counts)
        for line, digest in zip(lines, sums.tolist(), strict=True):
            self._check(line, digest)
        self._last[attempt] = last
        self._num_lines += len(lines)
        # A step that a later attempt did again has counted in its epoch already.
        new = np.repeat(self._holders.add(first, len(lines), attempt) == 0, counts)
        self._epochs.add(ids[new], positions[new])

    def _check_follows(self, step: int, attempt: int) -> None:
        """Check that an attempt skips no step and repeats no step."""
        # An attempt may begin with an earlier step, but not after the step that follows its restored state.
        expected = self._last.get(attempt, self._first.get(attempt, step) - 1) + 1
        if attempt in self._last and step < expected:
            raise CounterExample(
                step, "one line of an attempt", f"a second line of attempt {attempt}", "the step is counted twice"
            )
        if step > expected:
            found = f"step {step} as the next step of attempt {attempt}"
            raise CounterExample(expected, "a line", found, "the step is missing in this attempt")

    def _check(self, line: Line, digest: int) -> None:
        step, attempt = line["step"], line["attempt"]
        left_out_since = self._left_out.get(step, _LARGEST)
        skipped = bool(line.get("skipped"))
        # The attempt of the rollback has still used the step.
        if skipped != (attempt > left_out_since):
            raise self._wrongly_skipped(line, left_out_since)
        num_samples = self._plan.num_samples_in(step)
        if skipped:
            self._skipped[step] = attempt
            # No sample was used, and the positions show which samples were left out.
            num_samples = 0
        elif line.get("confirmed") is False:
            self._unconfirmed[step] = attempt
        else:
            self._num_reported += 1
        _check_value(line, "num_samples", num_samples, _OTHER_NUMBER)
        if skipped:
            _check_value(line, "positions", list(self._plan.positions(step)), _SHIFTED)
        _check_value(line, "samples_digest", f"{digest:016x}", _OTHER_SAMPLES)

    def _wrongly_skipped(self, line: Line, left_out_since: int) -> CounterExample:
        step, attempt = line["step"], line["attempt"]
        if line.get("skipped"):
            meaning = "samples were left out although no rollback left them out"
            return CounterExample(step, "the samples of this step", f"a skipped step in attempt {attempt}", meaning)
        expected = f"a skipped step since the rollback in attempt {left_out_since}"
        return CounterExample(step, expected, f"used in attempt {attempt}", "a step with bad numbers was used again")

    def proof(self, ended_at: int) -> Proof:
        """Return the numbers of the proof after a check for missing steps.

        Args:
            ended_at: the step at which the run ended, 0 if the run has not ended.

        Raises:
            CounterExample: a step up to the last one, or up to `ended_at`, is missing.
            UsageError: the run has no steps yet.
        """
        # The summary of a run knows its last step. The ledger alone would not show that its last lines are missing.
        last = max([ended_at, *self._last.values()])
        if not last:
            raise UsageError(f"{self._directory.uri} has no steps yet, so there is nothing to audit")
        self._check_none_missing(last)
        skipped = self._holding(self._skipped)
        left_out_samples = sum(self._plan.num_samples_in(step) for step in skipped)
        return Proof(
            steps=last,
            samples=self._plan.positions(last)[1] - left_out_samples,
            epochs=self._epochs.num_finished,
            epoch_samples=self._order.num_train,
            digests=self._num_reported,
            redone=self._num_lines - last,
            unconfirmed=len(self._holding(self._unconfirmed)),
            left_out=len(skipped),
            left_out_samples=left_out_samples,
            source_samples=self._epochs.source_samples,
        )

    def _check_none_missing(self, last: int) -> None:
        expected = 1
        for step in self._holders.steps():
            if step != expected:
                break
            expected += 1
        if expected <= last:
            meaning = f"no attempt recorded the step, and the run has reached step {last}"
            if expected > max(self._last.values(), default=0):
                meaning = f"the ledger has lost its last lines, as after a loss of power: the run reached step {last}"
            raise CounterExample(expected, "a line", "none", meaning)

    def _holding(self, marked: Mapping[int, int]) -> list[int]:
        """Return the marked steps whose marked attempt wrote the valid line."""
        return [step for step, attempt in marked.items() if self._holders.holds(step, attempt)]


_OTHER_NUMBER = "the number of samples of this step is not that of its global batch"
_SHIFTED = "the samples that were left out are not the samples of this step"
_OTHER_SAMPLES = (
    "samples were lost, repeated or swapped; if the first step already differs, the length of the dataset may have "
    "changed since the run"
)


def _check_value(line: Line, name: str, expected: Any, meaning: str) -> None:
    if line.get(name) != expected:
        raise CounterExample(line["step"], f"{name} {expected}", f"{line.get(name)}", meaning)


def _check_ends(plan: Plan, num_train: int) -> None:
    """Check that only an end of an epoch shortened a step.

    A run ends within a step only where an epoch ends.
    """
    for end in plan.ends:
        start, stop = plan.positions(end.step)
        if stop % num_train or not 0 < stop - start < plan.global_size:
            found = f"an end of the run at position {stop}"
            raise CounterExample(end.step, "an end of an epoch in this step", found, "the step may have other samples")


def _left_out(directory: RunDirectory) -> dict[int, int]:
    """Return each left-out step with the attempt of its rollback."""
    since: dict[int, int] = {}
    for rollback in directory.events(Rollback):
        # A step stays left out, so its first rollback counts.
        for step in rollback.steps:
            since.setdefault(step, rollback.attempt or 0)
    return since


class _Epochs:
    """Checks that each finished epoch used every training sample once."""

    # The check compares sums of sample hashes, as digests do. If one sample is missing and another sample appears
    # twice, the sum differs.
    source_samples: tuple[int, ...] = ()

    def __init__(
        self,
        order: SampleOrder,
        seed: int,
        plan: Plan,
        once: bool,
        position: Callable[[int], int] = int,
        name: str = "",
    ) -> None:
        """Prepare the check. Without `once` epochs are counted, but not checked.

        Args:
            position: for a source of a mixture, returns the position of the source's n-th sample.
            name: of the source, for messages.
        """
        self._order = order
        self._position = position
        self._name = name
        self._num_samples = order.num_train + order.num_validation
        self._plan = plan
        self._once = once
        self._seed = seed
        self._begun: dict[int, tuple[int, int]] = {}  # by epoch: samples so far, and the sum of their hashes
        self._expected: int | None = None
        self.num_finished = 0

    def add(self, ids: Int64s, positions: Int64s) -> None:
        """Add samples at ascending positions that were not added before.

        Raises:
            CounterExample: a finished epoch did not use every training sample once.
        """
        epochs = positions // self._order.num_train
        bounds = np.flatnonzero(np.diff(epochs, prepend=-1, append=_LARGEST))
        hashes = self._hashes(ids)
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            self._add(int(epochs[start]), stop - start, int(hashes[start:stop].sum()))

    def _add(self, epoch: int, num_samples: int, hash_sum: int) -> None:
        before, sum_before = self._begun.get(epoch, (0, 0))
        self._begun[epoch] = before + num_samples, (sum_before + hash_sum) % 2**64
        if before + num_samples == self._order.num_train:
            # The sums of finished epochs are dropped, so that memory does not grow with the run.
            _, found = self._begun.pop(epoch)
            if self._once:
                self._check(epoch, found)
            self.num_finished += 1

    def _check(self, epoch: int, found: int) -> None:
        if self._expected is None:
            self._expected = self._sum_of_training()
        if found != self._expected:
            meaning = (
                f"epoch {epoch + 1}{self._name} does not use each training sample once: its order is no permutation"
            )
            first = self._position(epoch * self._order.num_train)
            step = step_of(first, self._plan.global_size, self._plan.ends)
            raise CounterExample(step, f"hashes that sum to {self._expected:016x}", f"{found:016x}", meaning)

    def _sum_of_training(self) -> int:
        """Return the sum of the hashes of all training samples."""
        # All samples are summed, and the held-out ones subtracted. The order of an epoch, which is to be proved, is not
        # used.
        total = 0
        for start in range(0, self._num_samples, _PIECE):
            total += int(self._hashes(np.arange(start, min(start + _PIECE, self._num_samples))).sum())
        for start in range(0, self._order.num_validation, _PIECE):
            places = np.arange(start, min(start + _PIECE, self._order.num_validation))
            total -= int(self._hashes(self._order.validation(places)).sum())
        return total % 2**64

    def _hashes(self, ids: Int64s) -> UInt64s:
        # All samples are hashed as if at position 0, because their positions change from epoch to epoch.
        return sample_keys(ids, np.zeros_like(ids), self._seed)


def _once(order: str | Target) -> bool:
    """Return whether an order reads each sample once in an epoch."""
    return not isinstance(order, Target)


class _MixtureEpochs(_Epochs):
    """Checks the epochs of each source of a mixture, and the source's share of the samples."""

    def __init__(self, order: MixtureOrder, seed: int, plan: Plan, once: Sequence[bool]) -> None:
        super().__init__(order, seed, plan, once=False)
        self._turns = order.turns
        self._starts = order.starts
        self._sources = []
        for number, part in enumerate(order.parts):
            position = partial(order.turns.position, number)
            self._sources.append(_Epochs(part, seed, plan, once[number], position, f" of source {number}"))
        self.source_samples = (0,) * len(order.parts)

    def add(self, ids: Int64s, positions: Int64s) -> None:
        super().add(ids, positions)
        sources, turns = self._turns(positions)
        for number, (epochs, start) in enumerate(zip(self._sources, self._starts, strict=True)):
            its = sources == number
            if its.any():
                epochs.add(ids[its] - start, turns[its])
        counts = np.bincount(sources, minlength=len(self._sources))
        self.source_samples = tuple(int(old + new) for old, new in zip(self.source_samples, counts, strict=True))
