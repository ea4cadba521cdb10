"""What a worker process keeps from one attempt to the next."""

from __future__ import annotations

import hashlib
import math
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from app.checkpoint.export import load_exported
from app.checkpoint.snapshots import Shelf
from app.checkpoint.state import app_state
from app.checkpoint.writer import Writer
from app.config import Config
from app.data import Dataset, Loader, SampleOrder, build_dataset
from app.data.loader import own_randomness
from app.ledger import Ledger
from app.models import build_model
from app.optim import build_optimizer
from app.plan import Plan
from app.precision import build_precision
from app.rundir import base
from app.tasks import build_task
from app.trigger import Trigger


class Kept:
    """The data with its loader workers, and the replica that a survivor brings to its next world.

    held: the step whose state `model` and `optimizer` hold complete, 0 for the initial one, or NO_STATE.
    skip: the steps that are left out of the run. ledger: of the attempt under way. writer, shelf: of checkpoints and
    snapshots. Its triggers know how long ago something was done last, whatever attempt did it.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self._config = config
        self.precision = build_precision(config.precision, device)
        self.task = build_task(config.task)
        self.dataset = build_dataset(config.data)
        self.units_per_sample: int = getattr(self.dataset, "units_per_sample", 1)
        self.counts_vary: bool = getattr(self.dataset, "counts_vary", True)
        self.order = SampleOrder(len(self.dataset), config.data.validation_fraction, config.run.seed)
        self.loader = Loader(self.dataset, self.order, config.data, config.run.seed, device)
        self.fingerprint = fingerprint(self.dataset)
        self.skip: frozenset[int] = frozenset()
        self.ledger: Ledger | None = None
        self.writer = Writer()
        self.shelf = Shelf()
        steps_per_epoch = self.order.num_train / config.batch.global_size
        self.validation_trigger = Trigger(config.validation.every, steps_per_epoch)
        self.checkpoint_trigger = Trigger(config.checkpoint.every, steps_per_epoch)
        self.optimizer: torch.optim.Optimizer | None
        self.forget()
        self._warm_up()

    def _warm_up(self) -> None:
        """What the first attempt would import: more than a second's worth, for which the workers that are at it already
        would wait, and most of which torch hides in the first step of an optimizer."""
        optimizer = build_optimizer(self._config.optimizer, self.model)
        app_state(self.model, optimizer)
        if self._config.parallel.kind == "ddp":
            self.optimizer = optimizer
        else:
            import_module("app.parallel.fsdp")

    def forget(self) -> None:
        """Back to the initial weights, which the seed, or a file, makes the same on every rank."""
        torch.manual_seed(self._config.run.seed)
        model = build_model(self._config.model)
        if self._config.run.init_from:
            load_exported(model, base() / self._config.run.init_from)
        self.model: nn.Module = self.precision.convert(model)
        self.optimizer = None
        self.held = 0

    def leave_out(self, skip: frozenset[int]) -> None:
        """A state of other steps than those that are left in is not brought along: it may be poisoned by one of them,
        also where this worker did not live to hear of it."""
        if skip != self.skip:
            self.forget()
        self.skip = skip

    def close_ledger(self) -> None:
        """Before the next attempt, whose leader reads what this one has written."""
        if self.ledger:
            self.ledger.close()
        self.ledger = None

    @property
    def num_steps(self) -> int:
        run = self._config.run
        return run.steps or math.ceil((run.epochs or 0) * self.order.num_train / self._config.batch.global_size)

    @property
    def num_train_samples(self) -> int | None:
        """Where the stream of samples ends; a run counted in steps has no end but its steps."""
        run = self._config.run
        return None if run.steps else (run.epochs or 0) * self.order.num_train

    def plan(self, world_size: int, lockstep: bool) -> Plan:
        batch, end, skip = self._config.batch, self.num_train_samples, self.skip
        return Plan.even(
            batch.global_size, batch.microbatch_size, world_size, lockstep=lockstep, num_samples=end, skip=skip
        )

    def validation_plan(self, world_size: int, lockstep: bool) -> Plan | None:
        """One step over all samples that are held out; None if none are."""
        size = self.order.num_validation
        return Plan.even(size, self._config.batch.microbatch_size, world_size, lockstep=lockstep) if size else None

    def example(self) -> tuple[Tensor, ...]:
        """A batch of one real sample, on the device."""
        return tuple(tensor.to(self.precision.device) for tensor in _batch_of(self.dataset, 0))


def fingerprint(dataset: Dataset) -> str:
    """Tells one dataset from another at the cost of two samples."""
    digest = hashlib.sha256(str(len(dataset)).encode())
    for index in (0, len(dataset) - 1):
        for tensor in _batch_of(dataset, index):
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _batch_of(dataset: Dataset, index: int) -> tuple[Tensor, ...]:
    with own_randomness(0):  # or a dataset that augments would look like another one each time
        batch: Any = default_collate([dataset[index]])
    return tuple(batch)
