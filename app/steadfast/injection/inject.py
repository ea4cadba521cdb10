"""Inject the configured faults into this rank's steps.

`injection/probes.py` wraps the inputs of a step with the faults, so the training loop does not check for faults.
"""

import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from steadfast.config.faults import (
    AnyFault,
    DrainAt,
    FailAt,
    Fault,
    FlipAt,
    HangAt,
    KillAt,
    NanAt,
    OomAt,
    SlowAt,
    SpikeAt,
)
from steadfast.data import Fetched
from steadfast.injection.flips import Flips
from steadfast.run.directory import RunDirectory
from steadfast.run.events import Notice
from steadfast.tasks import Sums
from steadfast.world.runtime import Runtime, Signals, World

# `time.sleep` raises OverflowError for infinity.
_FOR_EVER_S = 1e9


class InjectedFault(Exception):
    """Exception that stands for a bug in the user's code."""


class Faults:
    """Faults that strike this rank in this attempt."""

    def __init__(self, wanted: Sequence[AnyFault], directory: RunDirectory, world: World, runtime: Runtime) -> None:
        self._store = directory.store
        self._attempt = world.attempt
        self._runtime = runtime
        self._slow: list[SlowAt] = []
        self._mine: list[Fault] = []
        self._to_flip: list[FlipAt] = []  # flips that have not struck in this attempt
        for fault in wanted:
            if isinstance(fault, SlowAt):
                if world.rank in fault.ranks:
                    self._slow.append(fault)
            elif fault.rank != world.rank:
                continue
            elif isinstance(fault, FlipAt):
                self._to_flip.append(fault)
            else:
                self._mine.append(fault)
        self._due: list[Fault] = []  # faults whose step has begun, but whose phase has not
        self._step = 0  # step 0 is the warm-up, in which no fault strikes
        self._factor = 1.0
        self._flips = Flips()
        self._number = 0  # index of the microbatch among this rank's microbatches of the step
        self.recomputed_step: int | None = None  # step of the microbatch that this rank repeats now

    @property
    def active(self) -> bool:
        """Return whether any fault is for this rank."""
        return bool(self._mine or self._slow or self._to_flip)

    def entering(self, batches: Iterator[Fetched]) -> Iterator[Fetched]:
        """Yield the batches and arm each step's faults at its first batch."""
        for fetched in batches:
            if fetched.microbatch.step != self._step:
                self._step = fetched.microbatch.step
                self._factor = 1.0
                self._number = -1
                # Faults of earlier steps stay due: a fault in a checkpoint waits for the next checkpoint.
                self._due += [fault for fault in self._mine if fault.step == self._step]
            self._number += 1
            self.reach("loader")
            yield fetched

    @contextmanager
    def recomputing(self, step: int) -> Iterator[None]:
        """Treat computations within the context as a repeated microbatch."""
        self.recomputed_step = step
        try:
            yield
        finally:
            self.recomputed_step = None

    def before_recomputing(self, model: nn.Module) -> None:
        """Inject the flips that are meant for a repeated microbatch."""
        self._flip(model, "recompute", self.recomputed_step)

    def before_forward(self, model: nn.Module) -> None:
        """Inject the faults that are due in a microbatch's forward."""
        self._flip(model, "step", self._step)
        for slow in self._slow:
            if slow.step <= self._step < (slow.until or math.inf):
                time.sleep(slow.ms / 1000)
        self.reach("forward")

    def _flip(self, model: nn.Module, during: str, step: int | None) -> None:
        self._flips.forget()
        for fault in list(self._to_flip):
            # A repeated microbatch is the only one of its step on this rank, and has no number among the rank's own.
            is_here = during == "recompute" or fault.microbatch == self._number
            if fault.during == during and fault.step == step and is_here:
                self._to_flip.remove(fault)
                if self._claim(fault):
                    self._flips.strike(fault, model)

    def corrupt(self, sums: Sums) -> Sums:
        """Return a task's sums, with the loss scaled by the step's faults."""
        # A multiplication by 1.0 would still cost a kernel on the device.
        if self._factor == 1.0:
            return sums
        return replace(sums, loss_sum=sums.loss_sum * self._factor)

    def signals(self, signals: Signals) -> Signals:
        """Return the rank's signals, with requests to leave that are due."""
        for fault in list(self._due):
            if isinstance(fault, DrainAt):
                self._due.remove(fault)
                if self._claim(fault):
                    signals = replace(signals, leave=True)
        return signals

    def reach(self, phase: str) -> None:
        """Inject the faults that are due in `phase`."""
        for fault in list(self._due):
            if _phase(fault) == phase and not isinstance(fault, DrainAt):
                self._due.remove(fault)
                if self._claim(fault):
                    self._strike(fault)

    def _claim(self, fault: Fault) -> bool:
        """Return whether the fault strikes now, and count the strike.

        A fault strikes once in a step, and `times` in the run.
        """
        kind = type(fault).model_fields["kind"].default
        phase = _phase(fault)
        if fault.times is not None:
            # Strikes are counted by files in the run directory, because a fault may end this process. For the same
            # reason the file is written before the fault strikes.
            name = f"{kind}-{phase}-step-{fault.step}-rank-{fault.rank}-time-"
            num_struck = sum(mark.startswith(name) for mark in self._store.list("faults"))
            if num_struck >= fault.times:
                return False
            self._store.commit(f"faults/{name}{num_struck + 1}", b"")
        text = f"fault {kind} injected on rank {fault.rank} in {phase} of step {fault.step}"
        notice = Notice(event="fault_injected", text=text, kind=kind, phase=phase, step=fault.step, rank=fault.rank)
        self._runtime.publish(notice.of_attempt(self._attempt))
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


def _phase(fault: Fault) -> str:
    if isinstance(fault, FlipAt):
        return f"{fault.where}-{fault.during}"
    return fault.phase if isinstance(fault, HangAt | KillAt) else "forward"
