"""Injected faults and timing, wrapped around the inputs of a step."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from steadfast.balance.shares import Balance
from steadfast.data import Fetched, Loader
from steadfast.data.batches import Batch
from steadfast.injection.inject import Faults
from steadfast.plan import Microbatch
from steadfast.tasks import Sums, Task
from steadfast.world.control import Rider
from steadfast.world.progress import Progress
from steadfast.world.runtime import Signals


class Probes(Rider):
    """Probes of an attempt without faults and timing, which pass everything on unchanged."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def task(self, task: Task) -> Task:
        """Return the task of the training steps."""
        return task

    def batches(self, batches: Iterator[Fetched]) -> Iterator[Fetched]:
        """Return the batches. The wait for each of them counts as the loader phase."""
        return self._progress.fetching(batches)

    @contextmanager
    def repeating(self, loader: Loader, microbatch: Microbatch) -> Iterator[Fetched]:
        """Fetch a microbatch, and yield it in the context for repeating the microbatch, without timing."""
        self._progress.mark("loader")
        fetched = loader.fetch(microbatch)
        self._progress.mark("forward")
        yield fetched

    def enter(self, phase: str) -> None:
        """Enter a phase that all ranks enter."""
        self._progress.enter(phase)

    def signals(self, signals: Signals) -> Signals:
        """Return the requests to the run."""
        return signals


def build_probes(faults: Faults, balance: Balance, progress: Progress) -> Probes:
    """Return probes that inject the faults of this rank, and time its microbatches for the balance."""
    if faults.active or balance.timed:
        return _ActiveProbes(faults, balance, progress)
    return Probes(progress)


class _ActiveProbes(Probes):
    """Wraps a step's batches, task, signals and control channel in one place."""

    def __init__(self, faults: Faults, balance: Balance, progress: Progress) -> None:
        super().__init__(progress)
        self._faults = faults
        self._balance = balance

    def task(self, task: Task) -> Task:
        return _ProbedTask(task, self._faults, self._balance)

    def batches(self, batches: Iterator[Fetched]) -> Iterator[Fetched]:
        """Return batches whose loading is timed and that trigger faults.

        The first batch of a step arms the faults of that step.
        """
        if self._faults.active:
            batches = self._faults.entering(batches)
        # Timing wraps the faults too, because the time of the loader is a part of the time of a microbatch.
        return self._balance.batches(self._progress.fetching(batches))

    @contextmanager
    def repeating(self, loader: Loader, microbatch: Microbatch) -> Iterator[Fetched]:
        with super().repeating(loader, microbatch) as fetched, self._faults.recomputing(microbatch.step):
            yield fetched

    def enter(self, phase: str) -> None:
        super().enter(phase)
        self._faults.reach(phase)

    def signals(self, signals: Signals) -> Signals:
        return self._faults.signals(signals)

    def payload(self) -> list[float]:
        self._faults.reach("collective")  # the message is posted right after this call
        return self._balance.payload()

    def on_result(self, step: int, payload: list[float]) -> None:
        self._balance.on_result(step, payload)


class _ProbedTask:
    def __init__(self, task: Any, faults: Faults, balance: Balance) -> None:
        self._task = task
        self._faults = faults
        self._balance = balance

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        if self._faults.recomputed_step is not None:
            self._faults.before_recomputing(model)
            sums: Sums = self._task.loss(model, batch)
            return sums
        self._faults.before_forward(model)
        sums = self._faults.corrupt(self._task.loss(model, batch))
        self._balance.forwarded()
        return sums

    def embed(self, model: nn.Module, batch: Batch) -> Any:
        self._faults.before_forward(model)
        return self._task.embed(model, batch)

    def loss_of_embeddings(self, embeddings: Any) -> Sums:
        return self._faults.corrupt(self._task.loss_of_embeddings(embeddings))
