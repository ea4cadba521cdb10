"""Single bits flipped on purpose: how many of those that change a microbatch which two ranks compute are found.

python -m tests.benchmarks.flips --flips 200

Three processes over gloo train a small GPT with dropout by the app's own `Stepper`, which checks every step. In each
step some flips strike, one at a time: in a gradient, an activation or a weight, at any bit, of the owner or the second
of what is compared, or elsewhere. Whether a flip has changed the microbatch is seen in the gradients themselves, beside
those of an undisturbed step, and not in their digests. After each the ranks that were not struck must hold the state of
the step before, to the bit; the one that was struck is given it, the step is done again, and its weights and optimizer
must be those of an undisturbed one.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from steadfast.balance.shares import Balance
from steadfast.checkpoint.state import State, flatten, sha256
from steadfast.config import Config
from steadfast.config.faults import FlipAt
from steadfast.errors import TrainingError
from steadfast.guards.corruption import Check, Corrupted, choose
from steadfast.guards.recompute import Recompute
from steadfast.injection.inject import Faults
from steadfast.injection.probes import Probes, build_probes
from steadfast.loop.worker_state import WorkerState
from steadfast.parallel import build_parallel
from steadfast.parallel.replicated import ReplicatedParallelism
from steadfast.plan import Plan, even_shares
from steadfast.run.directory import RunDirectory
from steadfast.run.events import Event
from steadfast.step.recompute_step import RecomputeStepper
from steadfast.step.stepper import Stepper
from steadfast.world.device import set_numerics
from steadfast.world.groups import WorldRank
from steadfast.world.runtime import Runtime, WorkerProcess, World, form_world
from tests.benchmarks.statistics import table
from tests.support.events import notices
from tests.support.gang import Gang, Member
from tests.support.reference import CPU
from tests.support.small import small

SIZE = 3
PLACES = ("gradient", "activation", "weight")
_ELSEWHERE = 0.2  # share of the flips that strike what is not compared, and need not be found


class Trial(NamedTuple):
    """A flip, and whether it strikes what owner or second compute for the comparison."""

    fault: FlipAt
    compared: bool


class Outcome(NamedTuple):
    """What one rank saw of a flip.

    Attributes:
        struck: a bit was flipped here.
        changed: what this rank computed for the comparison is not what it is in an undisturbed step.
        named: the rank that was said to compute wrongly, None if none was.
        error: why the run would have ended.
        kept: this rank, if it was not struck, held the state of the step before.
        same: after the step was done again its state was that of an undisturbed step.
    """

    struck: bool
    changed: bool
    named: int | None
    error: str
    kept: bool
    same: bool


def check_of(config: Config, step: int) -> Check:
    check = choose(_plan(config), 1, config.run.seed, [""] * SIZE, step)
    assert check is not None
    return check


def _plan(config: Config) -> Plan:
    batch = config.batch
    return Plan(batch.global_size, batch.samples_per_microbatch, even_shares(batch.num_microbatches, SIZE))


def draw(config: Config, num_flips: int, num_steps: int, seed: int) -> list[list[Trial]]:
    """Return the flips of each step."""
    chance = random.Random(seed)
    trials: list[list[Trial]] = [[] for _ in range(num_steps)]
    for number in range(num_flips):
        step = 1 + number % num_steps
        check = check_of(config, step)
        compared = chance.random() >= _ELSEWHERE
        owner = chance.random() < 0.5
        rank = check.owner if owner else check.second
        microbatch = 0
        if not compared:
            # Another microbatch of the owner's, or of the second's own, or any of a rank that is not asked.
            rank = chance.choice(range(SIZE))
            owner = True
            microbatch = 1 if rank == check.owner else 0
        fault = FlipAt(
            step=step,
            rank=rank,
            times=None,
            where=PLACES[number % len(PLACES)],
            bit=chance.randrange(64),
            element=chance.randrange(2**31),
            microbatch=microbatch,
            during="step" if owner else "recompute",
        )
        trials[step - 1].append(Trial(fault, compared))
    return trials


class Watched(Recompute):
    """Keeps what is compared, as it is: the bits of all gradients, and of the loss."""

    taken: list[Tensor] | None = None  # the first time in a step

    def take(self, loss_sum: Tensor, count: Tensor | int) -> None:
        if self.taken is None:
            count = torch.as_tensor(count, dtype=torch.float64)
            self.taken = [each.detach().clone() for each in (*self._buckets._flats, loss_sum, count)]
        super().take(loss_sum, count)


@dataclass
class Told:
    """The `Runtime` of a rank: only keeps what it is told."""

    device: torch.device = CPU
    events: list[Event] = field(default_factory=list)

    def publish(self, event: Event) -> None:
        self.events.append(event)


class Rank:
    """One of the ranks, which does single steps, disturbed or not, from a state that it can go back to."""

    def __init__(self, world: World, config: Config, folder: Path) -> None:
        self._world = world
        self._config = config
        self._directory = RunDirectory.of(config)
        self._worker = WorkerState(config, CPU)
        parallel = build_parallel(config.parallel, world, self._worker.precision)
        assert isinstance(parallel, ReplicatedParallelism)
        self._parallel = parallel
        self._model, self._state = self._worker.prepare(world, parallel)
        self._worker.load_initial()

    def step(self, step: int, trials: Sequence[Trial]) -> list[Outcome]:
        """Do a step once for each flip, and leave the state that an undisturbed one leaves."""
        before = _copy(self._state)
        taken, *_ = self._do(step)
        after = _copy(self._state)
        outcomes = [self._disturbed(step, trial.fault, taken, before, after) for trial in trials]
        _put(after, self._state)
        return outcomes

    def _disturbed(
        self, step: int, fault: FlipAt, honest: list[Tensor] | None, before: dict[str, Tensor], after: dict[str, Tensor]
    ) -> Outcome:
        _put(before, self._state)
        taken, struck, named, error = self._do(step, fault)
        changed = honest is not None and not _equal(dict(enumerate(honest)), dict(enumerate(taken or [])))
        kept = struck or named is None or _equal(before, flatten(self._state))
        _put(before, self._state)
        if named is None:
            return Outcome(struck, changed, named, error, kept, same=True)
        self._do(step)
        return Outcome(struck, changed, named, error, kept, _equal(after, flatten(self._state)))

    def _do(self, step: int, fault: FlipAt | None = None) -> tuple[list[Tensor] | None, bool, int | None, str]:
        """Return what was compared here, whether a bit was flipped here, who was named, and why the run would end."""
        told = Told()
        faults = Faults([fault] if fault else [], self._directory, self._world, cast(Runtime, told))
        probes = build_probes(faults, Balance(), self._world.progress)
        plan = _plan(self._config)
        recompute = Watched(
            partial(choose, plan, 1, self._config.run.seed, [""] * SIZE),
            partial(probes.repeating, self._worker.loader),
            self._parallel.buckets,
            cast(Runtime, told),
            self._world,
        )
        self._parallel.buckets.begin(self._world.groups.communicator)
        stepper = self._stepper(plan, probes, recompute)
        batches = probes.batches(self._worker.loader.steps(plan.stream(self._world.rank, step, step)))
        named, error = None, ""
        try:
            stepper.step(step, batches)
        except Corrupted as found:
            named = found.rank
        except TrainingError as found:
            error = str(found)
        struck = bool(notices(told.events, "fault_injected"))
        return recompute.taken, struck, named, error

    def _stepper(self, plan: Plan, probes: Probes, recompute: Recompute) -> Stepper:
        task = probes.task(self._worker.task)
        return RecomputeStepper(self._worker, task, self._world, plan, self._parallel, self._model, recompute)

    @property
    def digest(self) -> str:
        return sha256(self._state)


def _copy(state: State) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in flatten(state).items()}


def _put(source: dict[str, Tensor], state: State) -> None:
    with torch.no_grad():
        for name, tensor in flatten(state).items():
            tensor.copy_(source[name])


def _equal(ones: dict[Any, Tensor], others: dict[Any, Tensor]) -> bool:
    """By bits: a NaN equals itself."""
    if ones.keys() != others.keys():
        return False
    return all(torch.equal(_bytes(tensor), _bytes(others[name])) for name, tensor in ones.items())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _work(member: Member, config: Config, trials: list[list[Trial]], folder: Path) -> tuple[list[list[Outcome]], str]:
    set_numerics(tf32=False, deterministic=True)
    world = form_world(member.store, WorldRank(member.number, SIZE, 1), WorkerProcess(CPU))
    try:
        rank = Rank(world, config, folder)
        outcomes = [rank.step(step, of_step) for step, of_step in enumerate(trials, 1)]
        return outcomes, rank.digest
    finally:
        world.groups.destroy()


def _merged(trials: list[list[Trial]], answers: list[Any]) -> Iterator[tuple[Trial, list[Outcome]]]:
    for step, of_step in enumerate(trials):
        for number, trial in enumerate(of_step):
            yield trial, [outcomes[step][number] for outcomes, _ in answers]


def count(trials: list[list[Trial]], answers: list[Any]) -> dict[str, Counter[str]]:
    """Return the figures of each row: place, and whether what was struck is compared."""
    rows: dict[str, Counter[str]] = {}
    for trial, outcomes in _merged(trials, answers):
        row = rows.setdefault(f"{trial.fault.where}{'' if trial.compared else ', elsewhere'}", Counter())
        changed = any(outcome.changed for outcome in outcomes)
        named = {outcome.named for outcome in outcomes}
        found = named != {None}
        row["flips"] += any(outcome.struck for outcome in outcomes)
        row["changed"] += changed
        row["found"] += changed and found
        row["missed"] += changed and not found
        row["right rank"] += found and named == {trial.fault.rank}
        row["wrong alarms"] += found and (not changed or named != {trial.fault.rank})
        row["run ended"] += any(outcome.error for outcome in outcomes)
        row["same bits after"] += found and all(outcome.kept and outcome.same for outcome in outcomes)
    return rows


HEAD = ("flips", "changed", "found", "missed", "right rank", "same bits after", "wrong alarms", "run ended")


def bench(num_flips: int, num_steps: int, seed: int, precision: str) -> tuple[dict[str, Counter[str]], bool]:
    """Return the figures by place, and whether all ranks ended with one state, that of steps without any flip."""
    with tempfile.TemporaryDirectory() as folder:
        words = ("run.exact=true", f"precision.kind={precision}", f"run.steps={num_steps}")
        config = small(Path(folder), *words)
        trials = draw(config, num_flips, num_steps, seed)
        with Gang(SIZE) as gang:
            answers = gang.run(_work, config, trials, Path(folder))
        with Gang(SIZE) as gang:
            honest = gang.run(_work, config, [[] for _ in trials], Path(folder))
    return count(trials, answers), {digest for _, digest in answers} == {digest for _, digest in honest}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp64"), default="fp32")
    options = parser.parse_args()
    began_s = time.monotonic()
    rows, same = bench(options.flips, options.steps, options.seed, options.precision)
    cells = [["where", *HEAD]]
    for name in sorted(rows):
        cells.append([name, *(str(rows[name][column]) for column in HEAD)])
    print(table(cells))
    print(f"state of all ranks in the end as without any flip: {'yes' if same else 'NO'}")
    what = f"{options.flips} flips in {options.steps} steps, {options.precision}"
    print(f"{what}: {time.monotonic() - began_s:.0f} s")
    bad = sum(row["missed"] + row["wrong alarms"] + row["run ended"] for row in rows.values())
    found = sum(row["found"] for row in rows.values())
    named = sum(row["right rank"] for row in rows.values())
    return int(bool(bad) or named != found or not same)


if __name__ == "__main__":
    sys.exit(main())
