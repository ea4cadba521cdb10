"""Injected faults, on one rank without a run around it: where each strikes, how often, and that none costs nothing."""

import math
from contextlib import nullcontext
from pathlib import Path
from types import GeneratorType, SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
import yaml
from torch import Tensor, nn

from steadfast.balance.shares import Balance
from steadfast.config import parse_config
from steadfast.data import Fetched
from steadfast.injection import inject
from steadfast.injection.inject import Faults, InjectedFault
from steadfast.injection.probes import Probes, build_probes
from steadfast.plan import Microbatch
from steadfast.run.directory import RunDirectory
from steadfast.storage import LocalStore
from steadfast.tasks import Sums
from steadfast.world.progress import Progress
from steadfast.world.runtime import Signals, World
from tests.support.events import Published, notices

MODEL = nn.Identity()
NUM_MICROBATCHES = 2


class OnesTask:
    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums:
        return Sums(torch.ones((), requires_grad=True), 1)


class SumTask:
    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums:
        return Sums(model(torch.ones(1)).sum(), 1)


def faults(directory: Path, *wanted: dict[str, Any], rank: int = 1, told: Published | None = None) -> Probes:
    """Faults as a step meets them: around its batches, its task, its signals and its message."""
    config = parse_config(yaml.safe_dump({"faults": {"inject": list(wanted)}}))
    world = World(rank, 3, attempt=1, groups=cast(Any, None))
    runtime = cast(Any, Published() if told is None else told)
    return build_probes(
        Faults(config.faults.inject, RunDirectory(LocalStore(directory)), world, runtime), Balance(), Progress()
    )


def losses(faults: Probes, first: int = 1, last: int = 9) -> list[list[float]]:
    """Return the losses of each step's microbatches."""
    stream = (Microbatch(step, index, 0, 1) for step in range(first, last + 1) for index in range(NUM_MICROBATCHES))
    batches = faults.batches(Fetched(microbatch, (), 1, 0) for microbatch in stream)
    task = faults.task(OnesTask())
    found = [task.loss(MODEL, fetched.batch).loss_sum.item() for fetched in batches]
    return [found[at : at + NUM_MICROBATCHES] for at in range(0, len(found), NUM_MICROBATCHES)]


def begin(faults: Probes, step: int) -> None:
    """Fetch the first microbatch of a step."""
    next(faults.batches(iter([Fetched(Microbatch(step, 0, 0, 1), (), 1, 0)])))


@pytest.mark.parametrize(("kind", "error"), [("fail_at", InjectedFault), ("oom_at", torch.OutOfMemoryError)])
def test_an_exception_strikes_at_its_step_and_rank_and_once_in_the_run(
    tmp_path: Path, kind: str, error: type[Exception]
) -> None:
    faults(tmp_path, {"kind": kind, "step": 1, "rank": 1}).task(OnesTask()).loss(MODEL, ())  # a rehearsal is no step
    wanted = {"kind": kind, "step": 7, "rank": 1}
    with pytest.raises(error, match="step 7"):
        losses(faults(tmp_path, wanted))
    assert losses(faults(tmp_path, wanted)) == [[1.0, 1.0]] * 9  # the same step again, in another process
    assert losses(faults(tmp_path / "elsewhere", wanted, rank=0)) == [[1.0, 1.0]] * 9


def test_it_may_strike_a_number_of_times_or_every_time(tmp_path: Path) -> None:
    for times, expected in ((2, [True, True, False]), (None, [True, True, True])):
        wanted = {"kind": "fail_at", "step": 1 if times == 2 else 2, "rank": 1, "times": times}
        struck = []
        for _ in range(3):
            try:
                losses(faults(tmp_path, wanted))
                struck.append(False)
            except InjectedFault:
                struck.append(True)
        assert struck == expected


def test_loss_and_gradient_of_all_of_a_steps_microbatches_are_spoilt_and_of_no_others(tmp_path: Path) -> None:
    told, kinds = Published(), {3: "nan_at", 5: "spike_at"}
    spoilt = faults(tmp_path, *({"kind": kind, "step": step, "rank": 1} for step, kind in kinds.items()), told=told)
    one, nan, spike = ([value] * NUM_MICROBATCHES for value in (1.0, math.nan, 1000.0))
    assert str(losses(spoilt)) == str([one, one, nan, one, spike, one, one, one, one])
    struck = [(line["kind"], line["phase"], line["step"], line["rank"]) for line in notices(told, "fault_injected")]
    assert struck == [(kind, "forward", step, 1) for step, kind in kinds.items()]
    assert losses(spoilt, first=5, last=5) == [one]


def test_a_spoilt_loss_spoils_the_gradient_but_not_of_what_is_computed_for_another_rank(tmp_path: Path) -> None:
    spoilt = faults(tmp_path, {"kind": "spike_at", "step": 1, "rank": 1, "factor": 5})
    begin(spoilt, 1)
    layer = nn.Linear(1, 1, bias=False)
    task = spoilt.task(SumTask())
    for expected in (5.0, 1.0, 5.0):
        layer.weight.grad = None
        with spoilt.repeating(Mock(), Microbatch(2, 0, 0, 1)) if expected == 1.0 else nullcontext():
            task.loss(layer, ()).loss_sum.backward()
        assert layer.weight.grad == expected


def test_only_the_worker_that_is_drained_wishes_to_leave_and_once(tmp_path: Path) -> None:
    drained = faults(tmp_path, {"kind": "drain_at", "step": 2, "rank": 1})
    for step, leave in ((1, False), (2, True), (3, False)):
        losses(drained, step, step)
        assert drained.signals(Signals()) == Signals(leave=leave)


def test_each_phase_stalls_where_it_is_said_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stalled: list[float] = []
    monkeypatch.setattr(inject, "time", SimpleNamespace(sleep=stalled.append))  # other threads sleep as they did
    phases = ("loader", "forward", "collective", "checkpoint")
    hung = faults(
        tmp_path,
        *({"kind": "hang_at", "step": 2, "rank": 1, "phase": each, "seconds": at} for at, each in enumerate(phases, 1)),
    )
    losses(hung, 1, 1)
    hung.enter("checkpoint")
    assert hung.payload() == []
    assert stalled == []
    begin(hung, 2)
    assert stalled == [1]
    hung.task(OnesTask()).loss(MODEL, ())
    assert stalled == [1, 2]
    hung.enter("validation")  # another phase is not the one that is meant
    assert stalled == [1, 2]
    losses(hung, 3, 3)  # a checkpoint is not made at every step, nor is a message sent
    hung.enter("checkpoint")
    hung.enter("checkpoint")
    assert stalled == [1, 2, 4]
    assert hung.payload() == []
    assert hung.payload() == []
    assert stalled == [1, 2, 4, 3]


def test_who_is_slow_is_slow_in_every_microbatch_from_one_step_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(inject, "time", SimpleNamespace(sleep=slept.append))
    slow = {"kind": "slow_at", "step": 3, "until": 5, "ranks": [0, 1], "ms": 20}
    losses(faults(tmp_path, slow))
    losses(faults(tmp_path, slow, rank=2))
    assert slept == [0.02] * 2 * NUM_MICROBATCHES


def test_where_nothing_is_wanted_nothing_is_put_around(tmp_path: Path) -> None:
    none = faults(tmp_path, {"kind": "fail_at", "step": 7, "rank": 0})
    task = OnesTask()
    signals = Signals()
    assert none.task(task) is task
    assert none.signals(signals) is signals
    assert none.payload() == []
    batches = none.batches(Fetched(Microbatch(7, index, 0, 1), (), 1, 0) for index in range(NUM_MICROBATCHES))
    assert isinstance(batches, GeneratorType)
    assert batches.gi_code is Progress.fetching.__code__  # the watchdog's marks are all that is left around them
    none.enter("checkpoint")
    assert not (tmp_path / "faults").exists()


def flipped(
    directory: Path, flip: dict[str, Any], recomputed: tuple[int, ...] = (), last: int = 6
) -> tuple[list[tuple[int, int]], list[int]]:
    """Return (step, microbatch) of the rank's own that a flip has changed, and the steps of recomputed ones."""
    subject = faults(directory, {"kind": "flip_at", "rank": 1, "bit": 31, **flip})
    layer = nn.Linear(1, 1, bias=False)

    def changed() -> bool:
        layer.weight.data.fill_(1.0)
        layer.weight.grad = None
        sums = task.loss(layer, ())
        sums.loss_sum.backward()
        assert layer.weight.grad is not None
        return (sums.loss_sum.item(), layer.weight.grad.item(), layer.weight.item()) != (1.0, 1.0, 1.0)

    task = subject.task(SumTask())
    stream = (Microbatch(step, index, 0, 1) for step in range(1, last + 1) for index in range(NUM_MICROBATCHES))
    own, again = [], []
    for fetched in subject.batches(Fetched(microbatch, (), 1, 0) for microbatch in stream):
        if changed():
            own.append(fetched.microbatch[:2])
        step = fetched.microbatch.step + 1  # computed again before the step's own are asked for
        if fetched.microbatch.index == NUM_MICROBATCHES - 1 and step in recomputed:
            with subject.repeating(Mock(), Microbatch(step, 0, 0, 1)):
                if changed():
                    again.append(step)
    return own, again


@pytest.mark.parametrize("where", ["gradient", "activation", "weight"])
def test_a_bit_flips_in_the_microbatch_that_is_meant_once_in_the_run(tmp_path: Path, where: str) -> None:
    flip = {"step": 3, "where": where, "microbatch": 1}
    assert flipped(tmp_path, flip, recomputed=(3, 4)) == ([(3, 1)], [])
    assert flipped(tmp_path, flip) == ([], [])  # the same step again, in another process
    assert flipped(tmp_path / "always", {**flip, "times": None}) == ([(3, 1)], [])
    assert flipped(tmp_path / "always", {**flip, "times": None}) == ([(3, 1)], [])
    assert flipped(tmp_path / "another", {**flip, "rank": 0}) == ([], [])


@pytest.mark.parametrize("where", ["gradient", "activation", "weight"])
def test_a_bit_flips_while_the_rank_computes_for_another_one_and_not_in_its_own(tmp_path: Path, where: str) -> None:
    flip = {"step": 3, "where": where, "during": "recompute"}
    assert flipped(tmp_path, flip, recomputed=(2, 3, 4)) == ([], [3])
    assert flipped(tmp_path / "never", flip) == ([], [])
