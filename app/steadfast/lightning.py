"""Train a LightningModule, with its own loss, metrics, optimizer and schedule.

The module trains as by Lightning's automatic optimization. A module that would train differently is refused.
"""

import copy
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from steadfast.config import Config, load_config
from steadfast.data import Dataset, build_dataset
from steadfast.data.batches import Batch, tensors_of
from steadfast.data.extras import import_extra
from steadfast.data.order import SampleOrder
from steadfast.errors import UsageError
from steadfast.library import Result, fit
from steadfast.tasks import Mean, Sums

# Methods that a module may override beside its steps. `fit_module` calls the first two, and nothing needs the others.
_ALLOWED = ("prepare_data", "setup", "teardown", "train_dataloader", "val_dataloader")
_OF_OPTIMIZATION = (
    "backward",
    "configure_callbacks",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "optimizer_step",
    "optimizer_zero_grad",
)


def fit_module(
    config: Config | str | os.PathLike[str],
    module: Any,
    *,
    dataset: Dataset | None = None,
    validation: Dataset | None = None,
    **arguments: Any,
) -> Result:
    """Train a LightningModule as `steadfast.fit` trains a model.

    Sections `model`, `task`, `optimizer` and `schedule` of the configuration are replaced by the module's own, except
    `optimizer.max_grad_norm`, which is 1.0 by default, while Lightning clips nothing.

    Args:
        config: a configuration, or the path of a file.
        module: a LightningModule. A copy is trained.
        dataset, validation: map-style datasets, as for `fit`.
        arguments: further arguments of `fit`.

    Raises:
        UsageError: the module would train differently here.
        SteadfastError: as `fit` does.
    """
    if not isinstance(config, Config):
        config = load_config(os.fspath(config))
    _refuse_unlike(config, module)
    with _without_trainer(module, 1):
        module.prepare_data()
        module.setup("fit")
        optimizer, scheduler, per_epoch, frequency = _configured(module)
    kind, settings, rate = _settings_of(module, optimizer)
    if scheduler is not None:
        samples = dataset if dataset is not None else build_dataset(config.data)
        fraction = 0.0 if validation is not None else config.data.held_out_fraction
        steps = SampleOrder(len(samples), fraction, 0).num_train / config.batch.global_size if per_epoch else 1.0
        arguments["schedule"] = _Schedule(scheduler, optimizer, rate, steps * frequency)
    else:
        arguments["schedule"] = _constant
    section = config.optimizer.model_copy(update={"lr": rate})
    return fit(
        config.model_copy(update={"optimizer": section}),
        model=module,
        dataset=dataset,
        validation=validation,
        task=ModuleTask(),
        optimizer=_Optimizer(kind, settings),
        **arguments,
    )


class ModuleTask:
    """Task of a LightningModule: the loss of `training_step`, and in validation that of `validation_step`.

    Losses and logged values are means over the samples of a batch, as in Lightning.
    """

    model_methods = ("training_step", "validation_step")  # fsdp needs their names

    def loss(self, model: Any, batch: Batch) -> Sums:
        """Return the loss of a batch, with what the step has logged as metrics.

        Raises UsageError if the step gives no loss, or uses the trainer.
        """
        size = len(next(tensors_of(batch)))
        name = "training_step"
        # Before the first step `training_step` is tried in evaluation mode, with gradients.
        if not model.training and not torch.is_grad_enabled() and _overrides(model, "validation_step"):
            name = "validation_step"
        step = getattr(model, name)
        with _without_trainer(model, size) as logged:
            # The number of a batch is optional in Lightning.
            found = step(batch, _NoNumber()) if len(inspect.signature(step).parameters) > 1 else step(batch)
        if isinstance(found, dict):
            found = found.get("loss")
        if found is None and name == "validation_step":
            found = _logged_loss(type(model).__name__, logged)
        if not isinstance(found, Tensor):
            raise UsageError(f"{type(model).__name__}.{name} gives a {type(found).__name__}; it must give the loss")
        logged.pop("loss", None)  # the name of the loss itself
        metrics = {key: Mean(value * count, count) for key, (value, count) in logged.items()}
        return Sums(found * size, size, metrics)


def _logged_loss(module: str, logged: dict[str, tuple[Tensor, int]]) -> Tensor | None:
    """Return the loss that a validation step has logged.

    Raises UsageError if several values may be the loss.
    """
    for name in ("loss", "val_loss"):
        if name in logged:
            return logged[name][0]
    losses = [name for name in logged if name.endswith("loss")]
    if len(losses) > 1:
        raise UsageError(f"{module}.validation_step logs {', '.join(losses)}: call the loss of validation val_loss")
    return logged[losses[0]][0] if losses else None


class _NoNumber:
    """Stands for the number of a batch, so that a step which computes with the number is refused."""

    def _refuse(self, *_: object) -> NoReturn:
        raise UsageError(
            "a step uses batch_idx. Batches have no number here: their samples are the same for any number of workers, "
            "and a hook's run.step is the step"
        )

    __index__ = __int__ = __float__ = __bool__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __mul__ = __floordiv__ = __truediv__ = __mod__ = _refuse
    __hash__ = None  # type: ignore[assignment]


@contextmanager
def _without_trainer(module: nn.Module, size: int) -> Iterator[dict[str, tuple[Tensor, int]]]:
    """Stand in for the trainer. Yield what the module logs: by name, a value and the number of samples."""
    logged: dict[str, tuple[Tensor, int]] = {}

    def log(name: str, value: Any, *_: Any, batch_size: int | None = None, **__: Any) -> None:
        if not isinstance(value, Tensor | float | int):
            raise UsageError(
                f"{type(module).__name__} logs {name}, a {type(value).__name__}; log numbers, and give metrics of "
                "torchmetrics to the mapping `metrics` of a task"
            )
        logged[name] = torch.as_tensor(value).detach(), batch_size or size

    def log_dict(values: Any, *_: Any, **options: Any) -> None:
        for name, value in values.items():
            log(name, value, **options)

    replaced = {"log": log, "log_dict": log_dict, "_trainer": _NoTrainer(type(module).__name__)}
    before = {name: vars(module)[name] for name in replaced if name in vars(module)}
    vars(module).update(replaced)
    try:
        yield logged
    finally:
        for name in replaced:
            del vars(module)[name]
        vars(module).update(before)


class _NoTrainer:
    """Stands for the trainer, so that a module which uses the trainer is refused.

    Without a trainer Lightning's `global_step` and `current_epoch` would be 0 without a word.
    """

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        raise UsageError(
            f"{self._module} uses {name} of the trainer. There is no trainer here: a hook's run.step is the "
            "step, and a task of your own may keep a count in a buffer of the model"
        )


def _refuse_unlike(config: Config, module: Any) -> None:
    """Raise UsageError if Lightning would call more than the steps of the module."""
    lightning: Any = import_extra("lightning.pytorch", "lightning", "fit_module")
    name = type(module).__name__
    if not isinstance(module, lightning.LightningModule):
        raise UsageError(f"fit_module takes a LightningModule of the package lightning, not a {name}")
    if not module.automatic_optimization:
        raise UsageError(
            f"{name} has automatic_optimization=False, and its own calls of optimizers would not be made. "
            "docs/does_not_fit.md shows what to do with several optimizers"
        )
    if getattr(config.parallel, "reducer", None) == "torch":
        raise UsageError("parallel.reducer=torch: a LightningModule is trained by its steps, not by its forward")
    hooks = import_extra("lightning.pytorch.core.hooks", "lightning", "fit_module")
    known = [each for kind in ("ModelHooks", "DataHooks", "CheckpointHooks") for each in vars(getattr(hooks, kind))]
    for hook in (*known, *_OF_OPTIMIZATION):
        if hook.startswith(("__", "on_test", "on_predict", "test_", "predict_")) or hook in _ALLOWED:
            continue
        if _overrides(module, hook):
            raise UsageError(
                f"{name}.{hook} would not be called. Move its work into the steps or into a hook, see docs/your_own.md"
            )


def _overrides(module: Any, method: str) -> bool:
    base: Any = import_extra("lightning.pytorch", "lightning", "fit_module").LightningModule
    # Under fsdp the class of the module is one that torch derives from the user's.
    return getattr(type(module), method) is not getattr(base, method)


def _configured(module: Any) -> tuple[torch.optim.Optimizer, LRScheduler | None, bool, int]:
    """Return the module's optimizer, its schedule if any, whether the schedule steps per epoch, and how often.

    Raises UsageError for several optimizers, and for schedules that follow a metric.
    """
    found = module.configure_optimizers()
    schedulers: Sequence[Any] = []
    if isinstance(found, tuple | list) and len(found) == 2 and isinstance(found[0], tuple | list):
        found, schedulers = found
    if isinstance(found, tuple | list):
        if len(found) != 1:
            raise UsageError(
                f"{type(module).__name__}.configure_optimizers returns {len(found)} optimizers. docs/does_not_fit.md "
                "shows what to do with several"
            )
        [found] = found
    if isinstance(found, dict):
        schedulers = [found["lr_scheduler"]] if found.get("lr_scheduler") is not None else []
        found = found["optimizer"]
    if not isinstance(found, torch.optim.Optimizer):
        raise UsageError(f"{type(module).__name__}.configure_optimizers returns a {type(found).__name__}, no optimizer")
    if not schedulers:
        return found, None, True, 1
    scheduler, interval, frequency = schedulers[0], "epoch", 1
    if isinstance(scheduler, dict):
        interval, frequency = scheduler.get("interval", "epoch"), scheduler.get("frequency", 1)
        scheduler = scheduler["scheduler"]
    if isinstance(scheduler, ReduceLROnPlateau) or len(schedulers) > 1:
        raise UsageError(
            f"{type(scheduler).__name__} does not follow from the step alone, and is not kept. Return a schedule that "
            "does, or leave it out and set the section schedule by steadfast.fit"
        )
    if getattr(scheduler, "cycle_momentum", False):
        raise UsageError(f"{type(scheduler).__name__} also changes the momentum: set cycle_momentum=False")
    return found, scheduler, interval == "epoch", frequency


def _settings_of(
    module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[type[torch.optim.Optimizer], dict[str, Any], float]:
    """Return the class of an optimizer, its settings, and its learning rate before any schedule.

    Raises UsageError for several groups of parameters, for parameters that are left out, and for hidden settings.
    """
    if len(optimizer.param_groups) > 1:
        raise UsageError(
            f"{type(module).__name__}.configure_optimizers makes {len(optimizer.param_groups)} groups of parameters, "
            "which are not kept. Call steadfast.fit with task=ModuleTask() and name the groups in optimizer.groups"
        )
    [group] = optimizer.param_groups
    optimized = set(group["params"])
    for name, param in module.named_parameters():
        if param.requires_grad and param not in optimized:
            raise UsageError(f"configure_optimizers leaves out {name}, which would be trained: freeze the parameter")
    taken = inspect.signature(type(optimizer).__init__).parameters
    if any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        raise UsageError(f"{type(optimizer).__name__} takes **settings, whose names are unknown; name each of them")
    settings = {key: value for key, value in group.items() if key in taken and key not in ("params", "lr")}
    return type(optimizer), settings, float(group.get("initial_lr", group["lr"]))


class _Optimizer:
    """Builds the module's optimizer over other parameters."""

    def __init__(self, kind: Callable[..., torch.optim.Optimizer], settings: dict[str, Any]) -> None:
        self._kind = kind
        self._settings = settings
        self.__name__ = getattr(kind, "__name__", "optimizer")

    def __call__(self, params: Any, lr: float) -> torch.optim.Optimizer:
        return self._kind(params, lr=lr, **self._settings)


class _Schedule:
    """Factor of the learning rate by a scheduler of torch.

    Args:
        steps: steps of the run for one step of the scheduler.
    """

    def __init__(self, scheduler: LRScheduler, optimizer: torch.optim.Optimizer, rate: float, steps: float) -> None:
        self.__name__ = type(scheduler).__name__
        self._rate = rate
        self._steps = steps
        # A copy without the model's parameters, which may be large.
        self._optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=rate)
        [group] = self._optimizer.param_groups
        group |= {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        self._scheduler: LRScheduler = copy.deepcopy(scheduler, {id(optimizer): self._optimizer})
        self._factors: list[float] = [float(group["lr"]) / rate]

    def __call__(self, step: int, num_steps: int) -> float:
        # Rounded, because steps of an epoch may be a fraction.
        place = int((step - 1) / self._steps + 1e-9)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer makes no steps
            while len(self._factors) <= place:
                self._scheduler.step()
                self._factors.append(self._optimizer.param_groups[0]["lr"] / self._rate)
        return self._factors[place]


def _constant(step: int, num_steps: int) -> float:
    return 1.0
