"""Interface of parallel strategies, with the answers of a strategy that leaves the model as it is."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from steadfast.data.batches import Batch
from steadfast.parallel.buckets import GradientBuckets
from steadfast.parallel.precision import Precision
from steadfast.tasks import Sums
from steadfast.world.runtime import World


class Parallel(ABC):
    """Base class of parallel strategies."""

    # Factor that cancels a mean of the strategy over ranks, because gradients are sums here.
    loss_scale = 1.0
    # True if parameters, gradients and optimizer state are in host memory, and on the device only during their use.
    offloads = False
    buckets: GradientBuckets | None = None  # of the model that was wrapped last; None if the strategy has none

    def __init__(self, config: Any, world: World, precision: Precision) -> None:
        """Prepare for an arranged world by the section of the strategy's kind."""
        self._config = config
        self._world = world
        self._precision = precision
        self.survivors_hold_all: bool = config.survivors_hold_all  # see `ParallelSection`

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to train, over the default process group."""

    def register_methods(self, model: nn.Module, names: Iterable[str]) -> None:
        """Allow a task to call these methods of the wrapped model."""
        return

    def loss(self, task: Any, model: nn.Module, batch: Batch) -> Sums:
        """Return the task's loss of a batch, or of nothing on a rank that holds another stage."""
        sums: Sums = task.loss(model, batch)
        return sums

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of the last loss, which was scaled, within `synchronize`."""
        self._precision.backward(loss)

    @abstractmethod
    def synchronize(self, model: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Return the context of a microbatch, whose gradients are summed if `last`."""

    def train_also(self, trained: list[nn.Parameter]) -> bool:
        """Train all of these from now on, some of them frozen so far; return whether that is possible."""
        return False

    def store_gradients(self) -> None:
        """Store the sum over ranks in the parameters' gradients, after a wait."""
        return

    def whole_norms(self, norms: Tensor, gradients: list[Tensor]) -> Tensor:
        """Return the norms of the whole model's gradients, sharded as the gradients are.

        Args:
            norms: norm of this rank's part of each gradient.
        """
        return norms

    def detach_unused(self) -> None:
        """Set the gradients of unused parameters to None, after the gate.

        A parameter is unused if no rank has used it in the step.

        Raises:
            TrainingError: the step differs from that of one process.
        """
        return

    def clear_gradients(self, optimizer: Optimizer) -> None:
        """Clear the gradients of all parameters that the optimizer updates."""
        optimizer.zero_grad(set_to_none=True)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module with the user's parameter names, for forwards without gradients."""
        return model

    def whole(self, model: nn.Module) -> nn.Module | None:
        """Return the module if this rank alone can run the module."""
        return self.unwrap(model) if self.survivors_hold_all else None

    @staticmethod
    def units(model: nn.Module) -> list[str]:
        """Return the classes of separately gathered parts, the model first."""
        return []
