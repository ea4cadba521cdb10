"""Train from a script or a notebook, with objects in place of import paths."""

import copy
import hashlib
import itertools
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steadfast.checkpoint.catalog import Catalog
from steadfast.checkpoint.initial import build_initial
from steadfast.checkpoint.model_check import refuse_unsaved
from steadfast.checkpoint.state import ModelState, flatten
from steadfast.checkpoint.weights import read_whole
from steadfast.config import (
    CollateConfig,
    Config,
    DataConfig,
    HeldOut,
    MixtureData,
    SamplesConfig,
    ScalingConfig,
    Target,
    TargetData,
    TargetOptimizer,
    TargetTask,
    ValidationTarget,
    load_config,
    with_values,
)
from steadfast.config.variables import given_variables, taken_variables
from steadfast.data import Dataset, processes
from steadfast.data.datasets import Collate
from steadfast.data.order import Order
from steadfast.data.randomness import kept_randomness
from steadfast.errors import SteadfastError, TrainingError, UsageError
from steadfast.launch.detect import in_ray_program, under_torchrun
from steadfast.launch.ray import launch_within
from steadfast.launch.torchrun import Command, Ending, Place, train_here
from steadfast.parallel.precision import build_precision
from steadfast.run.directory import RunDirectory
from steadfast.telemetry.console import Console
from steadfast.world.device import torchrun_device

_calls = itertools.count()
_training = threading.Lock()


@dataclass(frozen=True)
class Result:
    """Result of a run.

    Attributes:
        summary: the content of `summary.json`. Its `status` is "finished" or "stopped".
        model: the trained model on its device, which is the CPU after workers of Ray have trained. None under fsdp,
            because no process holds the whole model.
        directory: the run directory. `steadfast export DIRECTORY --out FILE` writes the weights, also after fsdp.
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
    scaling: ScalingConfig | Mapping[str, Any] | None = None,
    return_finished: bool = False,
    verbose: bool = False,
) -> Result:
    """Train in this process, in those that torchrun started, or with elastic workers under Ray.

    Workers of Ray train if `scaling` is given, or if Ray runs in this program and the configuration gives a largest
    `scaling.num_workers` above 1. The same call resumes an unfinished run, and returns the model of a finished run.
    docs/your_own.md describes both, and what the first and the second Ctrl-C do.

    Args:
        config: a configuration, or the path of a file. The arguments below replace its sections.
        overrides: overrides of the file, such as "optimizer.lr=3e-4".
        model: a model, of which a copy is trained from its current weights; or a function that returns a model.
        dataset: a map-style dataset.
        validation: a separate dataset for validation.
        collate: makes a batch from a list of training samples. By default samples are stacked.
        validation_collate: the same for validation, for which `collate` is not used.
        order: "sequential", or a function (`steadfast.data.order.Order`). By default samples are shuffled.
        task: a `Task`: an object, or its method `loss(model, batch)`, which returns `Sums`.
        optimizer: called with `params` and `lr`, such as `torch.optim.SGD`.
        schedule: called with a step, counted from 1, and `num_steps`. It returns a factor of `optimizer.lr`.
        hooks: objects or classes, in addition to the hooks of the configuration.
        scaling: values for keys of the section `scaling`, such as {"num_workers": [1, 4]}. They may change in a resume.
        return_finished: return the model of a finished run even if other values trained it, such as another rate.
        verbose: print the same details as `-v`.

    Raises:
        RunConflict: a run of this name was trained with other values. The message lists the differences.
        SteadfastError: the run cannot begin or go on, or another call is training in this process.
    """
    if multiprocessing.current_process().name == processes.NAME:
        os._exit(1)  # it imports the main module, which lacks a guard; the worker reports that
    started_s = time.time()
    if not isinstance(config, Config):
        config = load_config(os.fspath(config), overrides)
    elif overrides:
        raise UsageError("overrides need a configuration file; to change a Config, pass a changed copy of it")
    if scaling is not None:
        config = _with_scaling(config, scaling)
    under_ray = _is_for_ray(config.scaling, asked=scaling is not None)
    if under_ray and isinstance(model, nn.Module):
        model = _copied(model).cpu()  # a worker may have no GPU of the same number
    data = _with_dataset(config.data, dataset, collate)
    data = _with_validation(data, validation, validation_collate)
    sections: dict[str, Any] = {"data": _with_order(data, order), "hooks": (*config.hooks, *_hooks(hooks))}
    if model is not None:
        sections["model"] = _model(model)
    if task is not None:
        sections["task"] = _task(task, config.task.coupled)
    if optimizer is not None:
        # These keys exist for every kind of optimizer, so their values are kept.
        kept = {"lr": config.optimizer.lr, "max_grad_norm": config.optimizer.max_grad_norm}
        sections["optimizer"] = TargetOptimizer.of_object("optimizer", _name(optimizer), optimizer, **kept)
    if schedule is not None:
        sections["schedule"] = Target.of_object("schedule", _name(schedule), schedule)
    config = config.model_copy(update=sections)
    with _only_call():
        taken_variables(config.cluster, os.environ)  # called for its error if a variable is missing
        # This process, or its children, are workers and get the variables that the configuration gives to workers.
        os.environ.update(given_variables(config.cluster))
        # A second Ctrl-C must end the training, but not the notebook.
        command = Command(config, started_s, started_s, owns_process=False, return_finished=return_finished)
        # Training and `build_initial` seed the random generators. Without `kept_randomness` a hyperparameter search
        # that draws a learning rate before each call would draw the same rate from the second call on.
        with kept_randomness(), closing(Console(verbose)) as console:
            try:
                if under_ray:
                    return _fit_under_ray(command, console)
                return _fit_here(command, model, console)
            except SteadfastError as error:
                raise error.with_traceback(None) from error.__cause__  # its message is enough, as for the command


def _fit_here(command: Command, model: nn.Module | Callable[[], nn.Module] | None, console: Console) -> Result:
    """Train in this process, with the other processes of torchrun if there are any."""
    config = command.config
    place = _place(config.scaling)
    _check_num_workers(config.scaling, place)
    # The path is resolved here once, because the user's code may change the working directory.
    directory = RunDirectory.of(config)
    if place.rank == 0:
        console.stage("starting", command.started_s)
    if isinstance(model, nn.Module):
        _take_weights_of_first(model, place)
    ending = train_here(command, directory, place, console)
    return _result(command, directory, place, ending)


def _fit_under_ray(command: Command, console: Console) -> Result:
    """Train with elastic workers under Ray.

    Raises:
        TrainingError: the run was stopped before its first step.
    """
    config = command.config
    directory = RunDirectory.of(config)
    console.stage("starting", command.started_s)
    launch_within(config, command.started_s, console, command.return_finished)
    summary = directory.summary()
    if summary is None:
        raise TrainingError("stopped before the first step")
    if not config.parallel.survivors_hold_all:
        return Result(summary, None, directory.uri)
    return Result(summary, _model_of(config, directory, torch.device("cpu")), directory.uri)


def _with_scaling(config: Config, given: ScalingConfig | Mapping[str, Any]) -> Config:
    """Return the configuration with these keys of `scaling`.

    Raises:
        ConfigError: a key is unknown or has a wrong value.
        UsageError: `given` has no keys.
    """
    if isinstance(given, ScalingConfig):
        given = given.model_dump(exclude_unset=True)
    if not isinstance(given, Mapping):
        raise UsageError(f'scaling={given!r}: must have keys of the section scaling, such as {{"num_workers": [1, 4]}}')
    return with_values(config, "scaling", given)


def _is_for_ray(scaling: ScalingConfig, asked: bool) -> bool:
    """Return whether workers of Ray shall train, and not this process.

    Args:
        asked: whether the argument `scaling` was given.

    Raises:
        UsageError: torchrun has started this process, and `scaling` was given.
    """
    if under_torchrun():
        if asked:
            raise UsageError(
                "scaling= trains with workers of Ray, and torchrun has started this process: leave scaling= out, or "
                "start the program without torchrun"
            )
        return False
    wants_workers = "num_workers" in scaling.model_fields_set and scaling.num_workers[1] > 1
    return asked or (wants_workers and in_ray_program())


@contextmanager
def _only_call() -> Iterator[None]:
    """Allow one call at a time in this process.

    Raises:
        UsageError: another call is training.
    """
    # torch's process group and random generators belong to the whole process. Waiting is no answer: a call from a hook
    # of the running call would wait for itself.
    if not _training.acquire(blocking=False):
        raise UsageError(
            "another fit is training in this process: wait until it has returned, or start one process for each call"
        )
    try:
        yield
    finally:
        _training.release()


def _model(given: nn.Module | Callable[[], nn.Module]) -> Target:
    """Return the section `model` for a model or a function that builds one."""
    if not isinstance(given, nn.Module):
        return Target.of_object("model", _name(given), given)
    # Each call returns a new copy, because an attempt may have to start from the original weights. The digest is an
    # argument of the model, so that a resume with another model is refused.
    refuse_unsaved(given, replicated=True)
    args = {"parameters": _digest(given)}
    return Target.of_object("model", _name(given), lambda **_: _copied(given), args=args)


def _with_dataset(config: DataConfig, dataset: Dataset | None, collate: Collate | None) -> DataConfig:
    """Return the section `data` with this dataset and its collate function.

    Raises:
        UsageError: the data are text or tokens and take no collate function.
    """
    if dataset is not None:
        # Keys that all data sections share, such as `validation_fraction`, keep their values.
        kept = {name: getattr(config, name) for name in SamplesConfig.model_fields if hasattr(config, name)}
        config = TargetData.of_object("data", _name(dataset), lambda: dataset, **kept)
    if collate is None:
        return config
    # Text and tokens are read in whole batches, so there is nothing to collate.
    if not isinstance(config, SamplesConfig):
        raise UsageError(
            "collate needs a dataset of samples: an image folder, a Hugging Face dataset or your own (dataset=)"
        )
    return config.replace("collate", Target.of_object("data.collate", _name(collate), collate))


def _with_validation(config: DataConfig, dataset: Dataset | None, collate: Collate | None) -> DataConfig:
    """Return the section `data` with this dataset and collate function for validation.

    Raises:
        UsageError: the data for validation are text or tokens and take no collate function.
    """
    section = config.validation
    if dataset is not None:
        section = ValidationTarget.of_object("data.validation", _name(dataset), lambda: dataset)
    if collate is not None:
        section = section or HeldOut()
        if not isinstance(section, CollateConfig):
            raise UsageError(
                "validation_collate needs a validation dataset of samples: held-out samples, an image folder, a "
                "Hugging Face dataset or your own (validation=)"
            )
        own = Target.of_object("data.validation.collate", _name(collate), collate)
        section = section.replace("collate", own)
    return config.replace("validation", section)


def _with_order(config: DataConfig, given: Order | Literal["shuffled", "sequential"] | None) -> DataConfig:
    """Return the section `data` with this order.

    Raises:
        UsageError: the order is unknown, or the data are a mixture.
    """
    if given is None:
        return config
    if isinstance(config, MixtureData):
        raise UsageError("order: a mixture has an order for each source, data.sources[N].order")
    if callable(given):
        return config.replace("order", Target.of_object("data.order", _name(given), given))
    # `replace` does not validate, so an unknown order would be found only when the data are read.
    if given not in ("shuffled", "sequential"):
        raise UsageError(f'order={given!r}: must be "shuffled", "sequential" or a function')
    return config.replace("order", given)


def _task(given: Any, coupled: bool) -> TargetTask:
    """Return the section `task` for an object, a class or a loss function."""
    task = given
    if not isinstance(given, type) and not hasattr(given, "loss"):
        task = SimpleNamespace(loss=given)
    return TargetTask.of_object("task", _name(given), _builder(task), coupled=coupled)


def _hooks(given: Sequence[Any]) -> list[Target]:
    """Return an entry of `hooks` for each object or class."""
    return [Target.of_object(f"hooks.{index}", _name(hook), _builder(hook)) for index, hook in enumerate(given)]


def _builder(given: Any) -> Callable[..., Any]:
    """Return a class itself, and for an object a function that returns the object."""
    if isinstance(given, type):
        return given
    return lambda: given


def _name(given: Any) -> str:
    # A partial has no name of its own.
    own = given.func if isinstance(given, partial) else given
    return str(getattr(own, "__name__", type(own).__name__))


def _copied(model: nn.Module) -> nn.Module:
    """Return a copy of the caller's model.

    Raises:
        UsageError: the model cannot be copied.
    """
    why = "its parameters have no values on the meta device"
    try:
        if not any(param.is_meta for param in model.parameters()):
            return copy.deepcopy(model)
    except (TypeError, RuntimeError) as error:
        why = str(error)
    name = type(model).__name__
    raise UsageError(
        f"model: this {name} cannot be copied: {why}. Pass a function that builds it: model=lambda: {name}()"
    )


def _digest(model: nn.Module) -> str:
    """Return a digest of the names and shapes of a model's weights."""
    # The values are left out, because the same program builds other random weights each time without a seed.
    shapes = [(name, list(value.shape)) for name, value in model.state_dict().items() if isinstance(value, Tensor)]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]


def _place(scaling: ScalingConfig) -> Place:
    """Return the device, rank and store of this process.

    Raises:
        UsageError: a process group exists, or gradients are disabled.
    """
    if dist.is_initialized():
        raise UsageError(
            "torch.distributed is in use, and fit forms its own groups: call destroy_process_group() first"
        )
    if not torch.is_grad_enabled():
        raise UsageError("fit was called within torch.no_grad() or torch.inference_mode(); call fit outside of it")
    number = next(_calls)
    if not under_torchrun():
        return Place(torchrun_device(scaling.gpus_per_worker), dist.HashStore())
    place = _torchruns_place(scaling.gpus_per_worker)
    # A call would read the answers of an earlier call without keys of its own in the store.
    return Place(place.device, dist.PrefixStore(f"fit-{number}", place.store), place.rank, place.world_size)


def _check_num_workers(scaling: ScalingConfig, place: Place) -> None:
    """Check that the configuration allows the number of processes.

    Raises:
        UsageError: `scaling.num_workers` is set and excludes this number.
    """
    low, high = scaling.num_workers
    # The default range is meant for Ray, so only a range that the user has given is an error here.
    if "num_workers" not in scaling.model_fields_set or low <= place.world_size <= high:
        return
    wanted = f"[{low}, {high}]"
    if low == high:
        wanted = str(low)
    raise UsageError(
        f"scaling.num_workers={wanted}, found {place.world_size}: fit trains in the processes of torchrun, or without "
        f"torchrun in a single process. Start the program by torchrun --nproc-per-node {low}, or train with workers of "
        f'Ray: scaling={{"num_workers": {[low, high]}}}'
    )


@cache  # the processes of torchrun meet once, not in every call
def _torchruns_place(gpus_per_worker: Any) -> Place:
    return Place.of_torchrun(gpus_per_worker)


@torch.no_grad()
def _take_weights_of_first(model: nn.Module, place: Place) -> None:
    """Copy the weights of rank 0's model to all ranks. A collective."""
    if place.world_size == 1:
        return
    # After a restart by torchrun its store still holds the keys of the attempt before.
    store = dist.PrefixStore(f"weights-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", place.store)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size)
    try:
        held = ModelState(model, trainable_only=False)
        for tensor in flatten(held.state_dict()).values():
            whole = tensor.cpu().contiguous()  # this group is one of gloo, for tensors on the CPU
            dist.broadcast(whole, 0)
            tensor.copy_(whole)
        held.load_copies()
    finally:
        dist.destroy_process_group()


def _result(command: Command, directory: RunDirectory, place: Place, ending: Ending) -> Result:
    """Return the result of a run, equal on every rank.

    Raises:
        UsageError: rank 0 refused the run.
        TrainingError: the run was stopped before its first step.
    """
    if ending.refusal:
        raise UsageError(ending.refusal)
    key = f"summary-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if place.rank == 0:  # only rank 0 has written the summary and can surely read it
        place.store.set(key, json.dumps(directory.summary()))
    summary = json.loads(place.store.get(key))
    if summary is None:
        raise TrainingError("stopped before the first step")
    if not command.config.parallel.survivors_hold_all:
        return Result(summary, None, directory.uri)
    # A run that was finished before this call has built no worker, so its model is in a checkpoint only.
    if ending.worker is None:
        return Result(summary, _model_of(command.config, directory, place.device), directory.uri)
    return Result(summary, ending.worker.model, directory.uri)


def _model_of(config: Config, directory: RunDirectory, device: torch.device) -> nn.Module:
    """Return the model of a finished run from its newest checkpoint."""
    catalog = Catalog(directory.store)
    model, _ = build_initial(config)
    model = build_precision(config.precision, device).convert(model)
    newest = catalog.newest()
    if newest is not None:
        # The model's own state has what checkpoints leave out: frozen parameters, and empty extra states.
        model.load_state_dict({**model.state_dict(), **read_whole(catalog, newest)})
    return model
