"""Train from a script or a notebook: `fit` takes objects in place of import paths, and gives the trained model back."""

import copy
import hashlib
import itertools
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from app.checkpoint.catalog import Catalog
from app.checkpoint.initial import build_initial
from app.checkpoint.weights import read_whole
from app.config import (
    CollateConfig,
    Config,
    DataConfig,
    HeldOut,
    SamplesConfig,
    Target,
    TargetData,
    TargetOptimizer,
    TargetTask,
    ValidationTarget,
    load_config,
)
from app.config.target import live_targets
from app.config.variables import given_variables, taken_variables
from app.data import Dataset
from app.data.order import Order
from app.data.randomness import kept_randomness
from app.errors import TrainingError, UsageError
from app.launch.detect import under_torchrun
from app.launch.torchrun import Ending, Place, train_here
from app.parallel import strategy_of
from app.parallel.precision import build_precision
from app.run.directory import RunDirectory
from app.run.interrupts import Interrupts
from app.telemetry.console import Console
from app.world.device import torchrun_device

_calls = itertools.count()
_training = threading.Lock()


@dataclass(frozen=True)
class Result:
    """What has come of a run.

    Attributes:
        summary: as in `summary.json`; its `status` is "finished" or "stopped".
        model: as it was trained, on its device. None under fsdp, which leaves no process with a whole one.
        directory: the run's; `main.py export DIRECTORY --out FILE` writes its weights, those of fsdp too.
    """

    summary: dict[str, Any]
    model: nn.Module | None
    directory: str


def fit(
    config: Config | str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    dataset: Dataset | None = None,
    validation: Dataset | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    validation_collate: Callable[[list[Any]], Any] | None = None,
    order: Order | Literal["shuffled", "sequential"] | None = None,
    task: Any = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    schedule: Callable[..., float] | None = None,
    hooks: Sequence[Any] = (),
    return_finished: bool = False,
    verbose: bool = False,
) -> Result:
    """Train under torchrun if that has started this process, else in this process alone. Without Ray.

    The same call again resumes an unfinished run and returns the model of a finished one, as the same command does.

    Args:
        config: a configuration, or a file and its `overrides`. What follows takes the place of its sections.
        model: a copy of it is trained, from its weights, under torchrun those of rank 0; or what makes one.
        dataset: map-style.
        validation: data of their own to validate on.
        collate: makes a batch of a list of training samples; without it they are stacked.
        validation_collate: the same for validation, which does not take `collate`.
        order: "sequential", or a function of your own, `app.data.order.Order`; by default samples are shuffled.
        task: an object with a method `loss(model, batch)` that returns `Sums`, or that function; or with `embed(model,
            batch)` and `loss(embeddings)`, see `Task`.
        optimizer: called with `params` and `lr`, such as `torch.optim.SGD`.
        schedule: called with a step, from 1, and `num_steps`; returns the share of `optimizer.lr`.
        hooks: objects or classes, beside those of the configuration.
        return_finished: returns the model of a finished run although it was trained with other values, such as another
            `optimizer.lr`. Another seed, model, dataset, task or kind of optimizer is an error in any case.
        verbose: shows what `-v` does.

    Raises:
        RunConflict: a run of this name was trained with other values; the message lists the differences.
        SteadfastError: the run cannot begin or go on, or another call is training in this process.
    """
    started_s = time.time()
    if not isinstance(config, Config):
        config = load_config(os.fspath(config), overrides)
    elif overrides:
        raise UsageError("overrides go with a file; of a Config, give another one")
    objects = _Objects()
    config = config.model_copy(
        update={
            **objects.model(model),
            **objects.data(config.data, dataset, validation, collate, validation_collate, order),
            **objects.task(config, task),
            **objects.optimizer(config, optimizer),
            **objects.schedule(schedule),
            "hooks": (*config.hooks, *objects.hooks(hooks)),
        }
    )
    with _only_call():
        taken_variables(config.cluster, os.environ)  # they are here already; what is missing is an error
        os.environ.update(given_variables(config.cluster))
        place = _place(config)
        _check_num_workers(config, place)
        directory = RunDirectory.of(config)  # once: code of the user's may change the working directory
        # Without it a search that draws a rate before each call would draw the same one from the second call on.
        with kept_randomness(), live_targets(objects.callables), closing(Console(verbose)) as console:
            if place.rank == 0:
                console.stage("starting", started_s)
            if isinstance(model, nn.Module):
                _take_weights_of_first(model, place)
            interrupts = Interrupts(of_process=False)
            ending = train_here(config, directory, place, started_s, started_s, console, interrupts, return_finished)
            return _result(config, directory, place, ending)


@contextmanager
def _only_call() -> Iterator[None]:
    """Keep the process to one call at a time. Raises UsageError if one is training already."""
    # The objects of a call and torch's process group are the whole process's.
    if not _training.acquire(blocking=False):
        raise UsageError(
            "another fit is training in this process: wait until it has returned, or start a process for each"
        )
    try:
        yield
    finally:
        _training.release()


class _Objects:
    """Gives objects names, by which a configuration holds them, and collects what `load_target` finds there."""

    def __init__(self) -> None:
        self.callables: dict[str, Callable[..., Any]] = {}

    def model(self, given: nn.Module | Callable[[], nn.Module] | None) -> dict[str, Target]:
        if given is None:
            return {}
        if not isinstance(given, nn.Module):
            return {"model": Target(target=self._name("model", given, given))}
        # A copy each time, because an attempt may have to begin with the weights as they were given. A resume compares
        # the digest, as it compares all arguments of a model.
        name = self._name("model", given, lambda **_: _copied(given))
        return {"model": Target(target=name, args={"parameters": _digest(given)})}

    def data(
        self,
        config: DataConfig,
        dataset: Dataset | None,
        validation: Dataset | None,
        collate: Callable[[list[Any]], Any] | None,
        validation_collate: Callable[[list[Any]], Any] | None,
        order: Order | Literal["shuffled", "sequential"] | None,
    ) -> dict[str, DataConfig]:
        if dataset is not None:
            kept = {name: getattr(config, name) for name in SamplesConfig.model_fields if hasattr(config, name)}
            config = TargetData(target=self._name("data", dataset, partial(_itself, dataset)), **kept)
        update: dict[str, Any] = {}
        if validation is not None:
            target = self._name("data.validation", validation, partial(_itself, validation))
            update["validation"] = ValidationTarget(target=target)
        if collate is not None:
            if not isinstance(config, SamplesConfig):
                raise UsageError("collate goes with a dataset of your own")
            update["collate"] = Target(target=self._name("data.collate", collate, collate))
        if validation_collate is not None:
            held_out = update.get("validation") or config.validation or HeldOut()
            if not isinstance(held_out, CollateConfig):
                raise UsageError("validation_collate goes with a dataset of your own")
            own = Target(target=self._name("data.validation.collate", validation_collate, validation_collate))
            update["validation"] = held_out.model_copy(update={"collate": own})
        if callable(order):
            update["order"] = Target(target=self._name("data.order", order, order))
        elif order is not None:
            if order not in ("shuffled", "sequential"):
                raise UsageError(f'order={order!r}: must be "shuffled", "sequential" or a function')
            update["order"] = order
        return {"data": config.model_copy(update=update)}

    def task(self, config: Config, given: Any) -> dict[str, TargetTask]:
        if given is None:
            return {}
        build = given
        if not isinstance(given, type):
            build = partial(_itself, given if hasattr(given, "loss") else SimpleNamespace(loss=given))
        return {"task": TargetTask(target=self._name("task", given, build), coupled=config.task.coupled)}

    def optimizer(self, config: Config, given: Callable[..., Any] | None) -> dict[str, TargetOptimizer]:
        if given is None:
            return {}
        of_any = {"lr": config.optimizer.lr, "max_grad_norm": config.optimizer.max_grad_norm}
        return {"optimizer": TargetOptimizer(target=self._name("optimizer", given, given), **of_any)}

    def schedule(self, given: Callable[..., float] | None) -> dict[str, Target]:
        return {} if given is None else {"schedule": Target(target=self._name("schedule", given, given))}

    def hooks(self, given: Sequence[Any]) -> list[Target]:
        targets: list[Target] = []
        for index, hook in enumerate(given):
            build = hook if isinstance(hook, type) else partial(_itself, hook)
            targets.append(Target(target=self._name(f"hooks.{index}", hook, build)))
        return targets

    def _name(self, key: str, given: Any, found: Callable[..., Any]) -> str:
        own = given.func if isinstance(given, partial) else given
        name = getattr(own, "__name__", type(own).__name__)
        target = f"<live {key}>:{re.sub(r'[^a-zA-Z0-9_]', '_', name)}"
        self.callables[target] = found
        return target


def _itself(given: Any, **_: Any) -> Any:
    return given


def _copied(model: nn.Module) -> nn.Module:
    """Return a copy of a model that the caller made. Raises UsageError if there can be none."""
    why = "its parameters have no values on the meta device"
    try:
        if not any(param.is_meta for param in model.parameters()):
            return copy.deepcopy(model)
    except (TypeError, RuntimeError) as error:
        why = str(error)
    name = type(model).__name__
    raise UsageError(
        f"model: this {name} cannot be copied: {why}. Give a function that makes it: model=lambda: {name}()"
    )


def _digest(model: nn.Module) -> str:
    """Return what tells models apart whose weights cannot be each other's."""
    shapes = [(name, list(tensor.shape)) for name, tensor in model.state_dict().items()]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]


def _place(config: Config) -> Place:
    """Return where this process trains. Another call is at another place, or it would read the answers of the first."""
    if dist.is_initialized():
        raise UsageError("torch.distributed is in use; fit forms groups of its own: call destroy_process_group() first")
    if not torch.is_grad_enabled():
        raise UsageError("fit is called within torch.no_grad() or torch.inference_mode(); call fit outside of it")
    number = next(_calls)
    if not under_torchrun():
        return Place(torchrun_device(config.scaling.gpus_per_worker), dist.HashStore())
    place = _torchruns_place(config.scaling.gpus_per_worker)
    return Place(place.device, dist.PrefixStore(f"fit-{number}", place.store), place.rank, place.world_size)


def _check_num_workers(config: Config, place: Place) -> None:
    """Raise UsageError if the configuration asks for other numbers of workers than there are."""
    low, high = config.scaling.num_workers
    if "num_workers" not in config.scaling.model_fields_set or low <= place.world_size <= high:
        return
    wanted = low if low == high else [low, high]
    raise UsageError(
        f"scaling.num_workers={wanted}, found {place.world_size}: fit trains in the processes of torchrun, else in "
        f"this one alone. Start the program by torchrun --nproc-per-node {low}, or train by main.py --config"
    )


@cache  # a process meets the others once
def _torchruns_place(gpus_per_worker: Any) -> Place:
    return Place.of_torchrun(gpus_per_worker)


@torch.no_grad()
def _take_weights_of_first(model: nn.Module, place: Place) -> None:
    """Give every rank the weights that rank 0 has been given. A collective."""
    if place.world_size == 1:
        return
    store = dist.PrefixStore(f"weights-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", place.store)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size)
    try:
        for tensor in model.state_dict().values():
            whole = tensor.cpu().contiguous()
            dist.broadcast(whole, 0)
            tensor.copy_(whole)
    finally:
        dist.destroy_process_group()


def _result(config: Config, directory: RunDirectory, place: Place, ending: Ending) -> Result:
    """Return what has come of a run, the same on every rank. Raises UsageError if rank 0 has refused the run."""
    if ending.refusal:
        raise UsageError(ending.refusal)
    key = f"summary-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if place.rank == 0:  # which has written it
        place.store.set(key, json.dumps(directory.summary()))
    summary = json.loads(place.store.get(key))
    if summary is None:
        raise TrainingError("stopped before the first step")
    model = None
    if strategy_of(config.parallel).survivors_hold_all:
        model = ending.worker.model if ending.worker else _model_of(config, directory, place.device)
    return Result(summary, model, directory.uri)


def _model_of(config: Config, directory: RunDirectory, device: torch.device) -> nn.Module:
    """Return the model of a run that has finished, from its newest checkpoint."""
    catalog = Catalog(directory.store)
    model, _ = build_initial(config)
    model = build_precision(config.precision, device).convert(model)
    newest = catalog.newest()
    if newest is not None:
        model.load_state_dict(read_whole(catalog, newest), strict=not config.checkpoint.trainable_only)
    return model
