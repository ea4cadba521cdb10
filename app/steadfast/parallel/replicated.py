"""Data parallel with this program's gradient buckets.

Every worker holds the whole model.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from steadfast.config import DdpConfig
from steadfast.data.batches import Batch
from steadfast.parallel.buckets import GradientBuckets
from steadfast.parallel.fixed_point import FixedPoint
from steadfast.parallel.precision import Precision
from steadfast.tasks import Sums
from steadfast.world.runtime import World


class ReplicatedParallelism:
    """Strategy for models that every worker holds whole, without a wrapper."""

    survivors_hold_all: ClassVar[bool] = DdpConfig.survivors_hold_all
    loss_scale = 1.0
    offloads = False

    def __init__(self, config: DdpConfig, world: World, precision: Precision) -> None:
        self._world = world
        self._precision = precision
        self._fixed_point = precision.scaling if isinstance(precision.scaling, FixedPoint) else None
        self._buckets: GradientBuckets

    @property
    def buckets(self) -> GradientBuckets:
        """Return the gradient buckets of the model that was wrapped last."""
        return self._buckets

    def wrap(self, model: nn.Module) -> nn.Module:
        self._buckets = GradientBuckets.of(model, self._fixed_point)
        self._buckets.begin(self._world.groups.communicator)
        return model

    def loss(self, task: Any, model: nn.Module, batch: Batch) -> Sums:
        sums: Sums = task.loss(model, batch)
        return sums

    def backward(self, loss: Tensor) -> None:
        self._precision.backward(loss)

    @contextmanager
    def synchronize(self, model: nn.Module, last: bool) -> Iterator[None]:
        self._buckets.expect(last)
        yield
        # Not after an exception: the peers would take an incomplete gradient for a whole one.
        self._buckets.finish()

    def register_methods(self, model: nn.Module, names: Iterable[str]) -> None:
        return

    def train_also(self, trained: list[nn.Parameter]) -> bool:
        self._buckets.lay_out(trained)
        return True

    def store_gradients(self) -> None:
        self._buckets.store()

    def whole_norms(self, norms: Tensor, gradients: list[Tensor]) -> Tensor:
        return norms

    def detach_unused(self) -> None:
        self._buckets.detach_unused()

    def clear_gradients(self, optimizer: Optimizer) -> None:
        # The optimizer's zero_grad would remove the parameters' views of the buckets.
        self._buckets.clear()

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    def whole(self, model: nn.Module) -> nn.Module | None:
        return model

    @staticmethod
    def units(model: nn.Module) -> list[str]:
        return []

    def writes(self, world: World) -> bool:
        return world.leader
