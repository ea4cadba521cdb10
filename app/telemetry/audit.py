"""Prove from its ledger that a run has used the samples that its plan gives: each step once, each sample once an epoch.

Nothing is trained or fetched: the samples of a step follow from the seed, the length of the dataset and `data.order`.
An order of the user's own is called for them; it may read a sample several times in an epoch, so that is not checked.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.config import Config, Target
from app.data.order import Int64s, SampleOrder, UInt64s, build_order, sample_keys
from app.errors import SteadfastError, UsageError
from app.plan import Plan, step_of
from app.run.directory import STEPS, RunDirectory
from app.run.events import AttemptStarted, Rollback
from app.storage.jsonl import Line, decode, read_blocks

_CHUNK = 2**20  # steps whose attempts lie in one array
_PIECE = 2**18  # samples ordered at once, so that memory does not grow with the global batch
_LARGEST = 2**32  # no step or attempt of a run comes so far


class CounterExample(SteadfastError):
    """The first place where a ledger is not what the plan gives."""

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
    """The numbers of a proof.

    Attributes:
        steps: all from 1 to this one, each with one line that holds.
        samples: that these steps have used.
        epochs: passes over the training samples that are finished.
        epoch_samples: training samples of the dataset, each of which comes once in an epoch.
        digests: lines whose digest, which the workers summed up, was compared with the plan's.
        redone: lines whose step was done again by a later attempt.
        unconfirmed: steps whose message died with a worker; their digest is the plan's own.
        left_out: steps that rollbacks have left out.
        left_out_samples: samples of these.
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

    def to_line(self) -> Line:
        return asdict(self)


def audit(directory: RunDirectory, config: Config, num_samples: int) -> Proof:
    """Prove that the run used each sample as planned, from a dataset of `num_samples`, held-out ones included.

    Raises:
        CounterExample: it did not.
        UsageError: it has no steps yet.
        ConfigError: `data.order` names code that cannot be loaded here.
    """
    auditor = _Auditor(directory, config, num_samples)
    for block in read_blocks(directory.store, STEPS):
        for piece in _pieces(decode(block), max(1, _PIECE // config.batch.global_size)):
            auditor.add(piece)
    return auditor.proof((directory.summary() or {}).get("step", 0))


def _pieces(lines: list[Line], num_lines: int) -> Iterator[list[Line]]:
    """Yield up to `num_lines` lines at a time in which one attempt goes on from step to step."""
    piece: list[Line] = []
    for line in lines:
        # A line cut short, or not of our writing, is none: its step is then missing.
        if not (_is_count(line.get("step")) and _is_count(line.get("attempt"))):
            continue
        follows = piece and line["attempt"] == piece[-1]["attempt"] and line["step"] == piece[-1]["step"] + 1
        if piece and (not follows or len(piece) == num_lines or line["step"] % _CHUNK == 0):
            yield piece
            piece = []
        piece.append(line)
    if piece:
        yield piece


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value < _LARGEST


class _Auditor:
    """Compares lines with the plan, in the order in which they were written."""

    def __init__(self, directory: RunDirectory, config: Config, num_samples: int) -> None:
        self._directory = directory
        self._seed = config.run.seed
        self._order = build_order(config.data, num_samples, config.run.seed)
        global_size = config.batch.global_size
        end = config.run.num_samples(self._order.num_train)
        ends = directory.amendments().ends
        # How steps are cut into microbatches is no matter here.
        self._plan = Plan.even(global_size, global_size, 1, num_samples=end, ends=ends)
        _check_ends(self._plan, self._order.num_train)
        self._num_steps = config.run.num_steps(self._order.num_train, global_size, ends) if end else _LARGEST
        # An order of the user's own may read a sample several times in an epoch, and another one never.
        once = not isinstance(config.data.order, Target)
        self._epochs = _Epochs(self._order, num_samples, self._seed, self._plan, once)
        self._left_out = _left_out(directory)
        self._first = {event.attempt: event.step + 1 for event in directory.events(AttemptStarted)}
        self._last: dict[int, int] = {}  # step by attempt
        self._attempts: dict[int, NDArray[np.uint32]] = {}  # by chunk: of each step that whose line holds, 0 for none
        self._num_lines = 0
        self._num_reported = 0
        self._unconfirmed: dict[int, int] = {}  # attempt by step
        self._skipped: dict[int, int] = {}  # attempt by step

    def add(self, lines: list[Line]) -> None:
        """Check lines in which one attempt goes on from step to step. Raises CounterExample."""
        first, last, attempt = lines[0]["step"], lines[-1]["step"], lines[0]["attempt"]
        self._check_follows(first, attempt)
        if last > self._num_steps:
            meaning = "the ledger goes on behind the end of the last epoch"
            raise CounterExample(self._num_steps + 1, f"no step after {self._num_steps}", f"step {last}", meaning)
        start, stop = self._plan.positions(first)[0], self._plan.positions(last)[1]
        positions = np.arange(start, stop)
        ids = self._order.train(positions)
        keys = sample_keys(ids, positions, self._seed)
        counts = np.array([self._plan.num_samples_in(line["step"]) for line in lines])
        sums = np.add.reduceat(keys, np.cumsum(counts) - counts)
        for line, digest in zip(lines, sums.tolist(), strict=True):
            self._check(line, digest)
        self._last[attempt] = last
        self._num_lines += len(lines)
        new = np.repeat(self._hold(first, len(lines), attempt), counts)
        self._epochs.add(ids[new], positions[new])

    def _check_follows(self, step: int, attempt: int) -> None:
        """Check that an attempt goes on where it was, or begins at its state's next step at the latest."""
        expected = self._last.get(attempt, self._first.get(attempt, step) - 1) + 1
        if attempt in self._last and step < expected:
            raise CounterExample(
                step, "one line of an attempt", f"a second one of attempt {attempt}", "it is counted twice"
            )
        if step > expected:
            found = f"step {step} as attempt {attempt}'s next one"
            raise CounterExample(expected, "a line", found, "the step is missing in this attempt")

    def _check(self, line: Line, digest: int) -> None:
        step, attempt = line["step"], line["attempt"]
        left_out_since = self._left_out.get(step, _LARGEST)
        skipped = bool(line.get("skipped"))
        if skipped != (attempt > left_out_since):
            raise self._wrongly_skipped(line, left_out_since)
        if skipped:
            self._skipped[step] = attempt
        elif line.get("confirmed") is False:
            self._unconfirmed[step] = attempt
        else:
            self._num_reported += 1
        _check_value(line, "num_samples", 0 if skipped else self._plan.num_samples_in(step), _OTHER_NUMBER)
        if skipped:
            _check_value(line, "positions", list(self._plan.positions(step)), _SHIFTED)
        _check_value(line, "samples_digest", f"{digest:016x}", _OTHER_SAMPLES)

    def _wrongly_skipped(self, line: Line, left_out_since: int) -> CounterExample:
        step, attempt = line["step"], line["attempt"]
        if line.get("skipped"):
            meaning = "samples were left out that nothing asked to leave out"
            return CounterExample(step, "its samples, as no rollback leaves it out", f"skipped in {attempt}", meaning)
        expected = f"left out since the rollback in attempt {left_out_since}"
        return CounterExample(step, expected, f"used in attempt {attempt}", "a bad step has come back")

    def _hold(self, first: int, num_lines: int, attempt: int) -> NDArray[np.bool_]:
        """Take note whose lines hold. Return which of the steps are seen for the first time."""
        number, offset = divmod(first, _CHUNK)
        chunk = self._attempts.setdefault(number, np.zeros(_CHUNK, np.uint32))[offset : offset + num_lines]
        new: NDArray[np.bool_] = chunk == 0
        # By attempt, not by place: a leader that was cut off may write its last lines after its successor's first ones.
        np.maximum(chunk, attempt, out=chunk)
        return new

    def proof(self, ended_at: int) -> Proof:
        """Return the numbers, if no step up to the last one, or to where the run says that it ended, is missing."""
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
        )

    def _check_none_missing(self, last: int) -> None:
        for number in range(last // _CHUNK + 1):
            chunk = self._attempts.get(number, np.zeros(_CHUNK, np.uint32))
            start = number * _CHUNK
            missing = np.flatnonzero(chunk[: last + 1 - start] == 0) + start
            missing = missing[missing > 0]  # steps count from 1
            if len(missing):
                meaning = f"no attempt has written it down, and the run has reached step {last}"
                raise CounterExample(int(missing[0]), "a line", "none", meaning)

    def _holding(self, marked: Mapping[int, int]) -> list[int]:
        """Return those of the marked steps whose marked line is the one that holds."""
        return [step for step, attempt in marked.items() if self._attempts[step // _CHUNK][step % _CHUNK] == attempt]


_OTHER_NUMBER = "other than the samples of a global batch have made this step"
_SHIFTED = "other samples were left out than those of this step"
_OTHER_SAMPLES = (
    "samples were lost, repeated or swapped; or, where that is so from the first step on, the dataset has another "
    "length now than it had in the run"
)


def _check_value(line: Line, name: str, expected: Any, meaning: str) -> None:
    if line.get(name) != expected:
        raise CounterExample(line["step"], f"{name} {expected}", f"{line.get(name)}", meaning)


def _check_ends(plan: Plan, num_train: int) -> None:
    """Check that steps were cut short where an epoch ends, and nowhere else: nothing else ends a run within a step."""
    for end in plan.ends:
        start, stop = plan.positions(end.step)
        if stop % num_train or not 0 < stop - start < plan.global_size:
            found = f"the run to have ended at position {stop}"
            raise CounterExample(end.step, "an end of an epoch in this step", found, "its samples may be others")


def _left_out(directory: RunDirectory) -> dict[int, int]:
    """Return the attempt that ended with the rollback, by the step that is left out since then."""
    since: dict[int, int] = {}
    for rollback in directory.events(Rollback):
        for step in rollback.steps:
            since.setdefault(step, rollback.attempt or 0)
    return since


class _Epochs:
    """Checks of each finished epoch that every training sample has come in it once."""

    # By the sum of a hash of each sample, as digests are: a set that lacks one and has another twice has another sum.
    def __init__(self, order: SampleOrder, num_samples: int, seed: int, plan: Plan, once: bool) -> None:
        """Count epochs alone unless each sample is to come `once`."""
        self._order = order
        self._num_samples = num_samples
        self._plan = plan
        self._once = once
        self._seed = seed
        self._begun: dict[int, tuple[int, int]] = {}  # by epoch: samples so far, and the sum of their hashes
        self._expected: int | None = None
        self.num_finished = 0

    def add(self, ids: Int64s, positions: Int64s) -> None:
        """Add samples at positions, which ascend and have not been added before. Raises CounterExample."""
        epochs = positions // self._order.num_train
        bounds = np.flatnonzero(np.diff(epochs, prepend=-1, append=_LARGEST))
        hashes = self._hashes(ids)
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            self._add(int(epochs[start]), stop - start, int(hashes[start:stop].sum()))

    def _add(self, epoch: int, num_samples: int, hash_sum: int) -> None:
        before, sum_before = self._begun.get(epoch, (0, 0))
        self._begun[epoch] = before + num_samples, (sum_before + hash_sum) % 2**64
        if before + num_samples == self._order.num_train:
            _, found = self._begun.pop(epoch)
            if self._once:
                self._check(epoch, found)
            self.num_finished += 1

    def _check(self, epoch: int, found: int) -> None:
        if self._expected is None:
            self._expected = self._sum_of_training()
        if found != self._expected:
            meaning = f"epoch {epoch + 1} has not each training sample once: its order is no permutation"
            step = step_of(epoch * self._order.num_train, self._plan.global_size, self._plan.ends)
            raise CounterExample(step, f"hashes that sum to {self._expected:016x}", f"{found:016x}", meaning)

    def _sum_of_training(self) -> int:
        """Return the sum over all samples of the dataset without those that are held out."""
        total = 0
        for start in range(0, self._num_samples, _PIECE):
            total += int(self._hashes(np.arange(start, min(start + _PIECE, self._num_samples))).sum())
        for start in range(0, self._order.num_validation, _PIECE):
            places = np.arange(start, min(start + _PIECE, self._order.num_validation))
            total -= int(self._hashes(self._order.validation(places)).sum())
        return total % 2**64

    def _hashes(self, ids: Int64s) -> UInt64s:
        return sample_keys(ids, np.zeros_like(ids), self._seed)
