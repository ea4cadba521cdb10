"""Tasks of the user's own.

A task whose result would differ from that of a plain loop is refused with a one-line error.
"""

import inspect
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

from torch import nn

from steadfast.config import TargetTask
from steadfast.config.target import build_target, load_section
from steadfast.data.batches import Batch, tensors_of
from steadfast.errors import ConfigError, Problem, UsageError
from steadfast.tasks import Sums
from steadfast.world.no_collectives import RefusedCollective, no_collectives

_MIXED = "mixed torch.Tensor and DTensor"  # torch's message if a sharded weight meets a plain tensor


class OwnTask:
    """Task of the user's own with one loss per batch.

    The loss of a batch is the sum of its samples' losses.

    Args:
        task: the user's object, whose other attributes stay visible.
        name: name of the task in messages, from its target.
    """

    def __init__(self, task: Any, name: str) -> None:
        self._task = task
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        # `copy` and `pickle` ask for attributes before `_task` is set, and looking for it here again would never end.
        if attribute == "_task":
            raise AttributeError(attribute)
        return getattr(self._task, attribute)

    @property
    def unwrapped(self) -> Any:
        """Return the user's object."""
        return self._task

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        """Return the loss of a batch.

        Raises:
            UsageError: the loss runs a collective, returns something other than `Sums`, or calls a part of a sharded
                model.
        """
        return self._checked(self._call("loss", model, batch))

    def _call(self, method: str, *args: Any) -> Any:
        # A collective of user code could also wait for ever, because ranks have different numbers of microbatches.
        try:
            with no_collectives():
                return getattr(self._task, method)(*args)
        except RefusedCollective as refused:
            raise UsageError(
                f"{self._name}.{method} calls a collective over all workers ({refused} of torch.distributed), so the "
                "result would depend on their number. For a loss over the whole global batch give the task "
                "embed(model, batch) and loss(embeddings), which run with any number of workers; otherwise compute the "
                "loss from the task's own batch alone"
            ) from refused
        except RuntimeError as error:
            # torch has no type of its own for this error, so the text of its message identifies it.
            if _MIXED not in str(error):
                raise
            raise UsageError(
                f"{self._name}.{method} calls a part or a method of the model, whose weights are shards under "
                "parallel.kind=fsdp: call the model itself, and let its forward do the rest, or name the method in an "
                f'attribute of the task, model_methods = ["..."] ({str(error).partition(chr(10))[0]})'
            ) from error

    def _checked(self, result: Any) -> Sums:
        if isinstance(result, Sums):
            return result
        raise UsageError(
            f"{self._name}.loss returned a {type(result).__name__}, not Sums: return steadfast.Sums(loss_sum, count), "
            "the sum of the losses in the batch and their number; for a mean loss return "
            "Sums(loss * len(batch), len(batch))"
        )


class GlobalTask(OwnTask):
    """Task with one loss over the whole global batch, such as a contrastive loss."""

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        """Return the loss of a batch as if the batch were the global batch.

        Raises UsageError like `OwnTask.loss`.
        """
        return self.loss_of_embeddings(self.embed(model, batch))

    def embed(self, model: nn.Module, batch: Batch) -> Any:
        """Return the embeddings of a batch, tensors (samples, ...).

        The tensors may be in tuples, mappings or dataclasses. Raises UsageError like `OwnTask.loss`.
        """
        embeddings = self._call("embed", model, batch)
        # Integers carry no gradient, so without floating point tensors nothing would be trained.
        if not any(tensor.is_floating_point() for tensor in tensors_of(embeddings)):
            raise UsageError(
                f"{self._name}.embed returned a {type(embeddings).__name__} without floating point tensors: return the "
                "embeddings, with a row for each sample"
            )
        return embeddings

    def loss_of_embeddings(self, embeddings: Any) -> Sums:
        """Return the loss of the embeddings of a global batch.

        Raises UsageError like `OwnTask.loss`.
        """
        return self._checked(self._call("loss", embeddings))


def build_own_task(section: TargetTask) -> OwnTask:
    """Build the task of a target: a class, a function that returns an object, or a loss function.

    Raises ConfigError if the target is no task.
    """
    found = load_section(section, "task")
    # A function that builds a task takes the arguments alone, a loss function the model and a batch as well.
    if not isinstance(found, type) and not _takes(found, 0, section.args) and _takes(found, 2, section.args):
        return own_task(SimpleNamespace(loss=partial(found, **section.args)), section.target)
    return own_task(build_target(section, "task"), section.target)


def own_task(task: Any, target: str) -> OwnTask:
    """Wrap the user's object as a task.

    Raises ConfigError if its `loss` has the arguments of neither kind of task.
    """
    name = target.rpartition(":")[2]
    if _takes(getattr(task, "loss", None), 2):
        return OwnTask(task, name)
    if callable(getattr(task, "embed", None)) and _takes(getattr(task, "loss", None), 1):
        return GlobalTask(task, name)
    what = (
        f'"{target}" returned a {type(task).__name__} without loss(model, batch), and without embed(model, batch) and '
        "loss(embeddings)"
    )
    raise ConfigError([Problem("", "task.target", what)])


def _takes(method: Any, num_arguments: int, named: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """Return whether a method accepts this number of positional arguments and the named ones."""
    if not callable(method):
        return False
    # A method may have further arguments with defaults, so its parameters are bound rather than counted.
    try:
        inspect.signature(method).bind(*[None] * num_arguments, **named)
    except TypeError:
        return False
    except ValueError:  # some builtins have no signature
        return num_arguments == 2
    return True
