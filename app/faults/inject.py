"""Faults by configuration. They are put around what a step is given (its batches, its task, the store), so the loop
has no line that asks for them, and nothing is put around anything where none are wanted."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from app.config.faults import AnyFault, DrainAt, FailAt, Fault, HangAt, KillAt, NanAt, OomAt, Phase, SlowAt, SpikeAt
from app.data import Fetched
from app.rundir import RunDirectory
from app.runtime import Runtime, Signals, World
from app.tasks import Sums, Task

T = TypeVar("T")
_FOR_EVER_S = 1e9


class InjectedFault(Exception):
    """Stands for a bug in the user's code."""


class Faults:
    """What strikes this rank in this attempt.

    How often a fault has struck is remembered by files in the run directory, since the process that it strikes may be
    gone: `faults/kill_at-forward-step-7-rank-1-time-1`, created before it strikes.
    """

    def __init__(self, wanted: Sequence[AnyFault], directory: RunDirectory, world: World, runtime: Runtime) -> None:
        self._store, self._world, self._runtime = directory.store, world, runtime
        self._slow = [each for each in wanted if isinstance(each, SlowAt) and world.rank in each.ranks]
        self._mine = [each for each in wanted if not isinstance(each, SlowAt) and each.rank == world.rank]
        self._due: list[Fault] = []  # their step has begun, the phase they strike in has not
        self._step, self._factor = 0, 1.0  # the rehearsal is step 0, of which no fault is

    def batches(self, batches: Iterator[Fetched]) -> Iterator[Fetched]:
        return self._entering(batches) if self._mine or self._slow else batches

    def task(self, task: Task) -> Task:
        return _FaultyTask(task, self) if self._mine or self._slow else task

    def store(self, store: T) -> T:
        """`store`, whose `save` is the checkpoint phase."""
        return self._around(store, "save", "checkpoint")

    def group(self, group: T) -> T:
        """`group`, whose `allreduce` is the collective phase."""
        return self._around(group, "allreduce", "collective")

    def signals(self, signals: Signals) -> Signals:
        drained = [each for each in self._due if isinstance(each, DrainAt) and self._claims(each)]
        return replace(signals, leave=True) if drained else signals

    def loss(self, task: Task, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums:
        """A microbatch's."""
        for slow in self._slow:
            if slow.step <= self._step < (slow.until or math.inf):
                time.sleep(slow.ms / 1000)
        self._reach("forward")
        sums = task.loss(model, batch)
        return sums if self._factor == 1.0 else replace(sums, loss_sum=sums.loss_sum * self._factor)

    def _entering(self, batches: Iterator[Fetched]) -> Iterator[Fetched]:
        for fetched in batches:
            if fetched.microbatch.step != self._step:
                self._step, self._factor = fetched.microbatch.step, 1.0
                self._due += [each for each in self._mine if each.step == self._step]
            self._reach("loader")
            yield fetched

    def _around(self, owner: T, verb: str, phase: Phase) -> T:
        return cast(T, _Before(owner, verb, lambda: self._reach(phase))) if self._mine else owner

    def _reach(self, phase: Phase) -> None:
        for fault in [each for each in self._due if _phase(each) == phase]:
            if not isinstance(fault, DrainAt) and self._claims(fault):
                self._strike(fault)

    def _claims(self, fault: Fault) -> bool:
        """Whether it strikes now: it does so once in a step, and `times` in the run."""
        self._due.remove(fault)
        kind, phase = type(fault).model_fields["kind"].default, _phase(fault)
        name = f"{kind}-{phase}-step-{fault.step}-rank-{fault.rank}"
        if fault.times is not None and not self._marked(name, fault.times):
            return False
        said = {"kind": kind, "phase": phase, "step": self._step, "rank": self._world.rank}
        self._runtime.publish({"event": "fault_injected", "attempt": self._world.attempt, **said})
        return True

    def _marked(self, name: str, times: int) -> bool:
        struck = [mark for mark in self._store.list("faults") if mark.startswith(f"{name}-time-")]
        if len(struck) >= times:
            return False
        self._store.commit(f"faults/{name}-time-{len(struck) + 1}", b"")
        return True

    def _strike(self, fault: Fault) -> None:
        match fault:
            case FailAt():
                raise InjectedFault(f"injected at step {self._step}")
            case OomAt():
                raise torch.OutOfMemoryError(f"injected at step {self._step}")
            case KillAt():
                os.kill(os.getpid(), signal.SIGKILL)
            case HangAt(seconds=seconds):
                time.sleep(seconds or _FOR_EVER_S)
            case NanAt():
                self._factor = math.nan
            case SpikeAt(factor=factor):
                self._factor *= factor


def _phase(fault: Fault) -> Phase:
    return fault.phase if isinstance(fault, HangAt | KillAt) else "forward"


class _FaultyTask:
    def __init__(self, task: Task, faults: Faults) -> None:
        self._task, self._faults = task, faults

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums:
        return self._faults.loss(self._task, model, batch)


class _Before:
    """Any object, but for one verb of it, before which something happens; to look it up is to call it."""

    def __init__(self, owner: object, verb: str, happens: Callable[[], None]) -> None:
        self._owner, self._verb, self._happens = owner, verb, happens

    def __getattr__(self, name: str) -> Any:
        if name == self._verb:
            self._happens()
        return getattr(self._owner, name)
