"""Data parallel with this program's gradient buckets.

Every worker holds the whole model.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from steadfast.parallel.buckets import GradientBuckets
from steadfast.parallel.fixed_point import FixedPoint
from steadfast.parallel.strategy import Parallel


class ReplicatedParallelism(Parallel):
    """Strategy for models that every worker holds whole, without a wrapper."""

    buckets: GradientBuckets

    def wrap(self, model: nn.Module) -> nn.Module:
        scaling = self._precision.scaling
        fixed_point = scaling if isinstance(scaling, FixedPoint) else None
        self.buckets = GradientBuckets.of(model, fixed_point)
        self.buckets.begin(self._world.groups.communicator)
        return model

    @contextmanager
    def synchronize(self, model: nn.Module, last: bool) -> Iterator[None]:
        self.buckets.expect(last)
        yield
        # Not after an exception: the peers would take an incomplete gradient for a whole one.
        self.buckets.finish()

    def train_also(self, trained: list[nn.Parameter]) -> bool:
        self.buckets.lay_out(trained)
        return True

    def store_gradients(self) -> None:
        self.buckets.store()

    def detach_unused(self) -> None:
        self.buckets.detach_unused()

    def clear_gradients(self, optimizer: Optimizer) -> None:
        # The optimizer's zero_grad would remove the parameters' views of the buckets.
        self.buckets.clear()
