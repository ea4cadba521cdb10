"""Communication hooks of torch's DistributedDataParallel under `parallel.reducer=torch`."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from steadfast.data.batches import Batch
from steadfast.tasks import LanguageModeling, Sums
from tests.support.claims import check_run
from tests.support.drill import drill
from tests.support.reference import reference
from tests.support.small import small


class Hooked(LanguageModeling):
    """Registers a communication hook on each DistributedDataParallel that computes a loss.

    Args:
        dropped: whether the hook replaces the gradients by zeros.
    """

    def __init__(self, dropped: bool, **fields: Any) -> None:
        super().__init__(**fields)
        self._hooked: nn.Module | None = None
        self._dropped = dropped

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        # Each world wraps the model anew, and the check before the first step passes the model without a wrapper.
        if isinstance(model, DistributedDataParallel) and model is not self._hooked:
            model.register_comm_hook(None, drop_gradients if self._dropped else allreduce_hook)
            self._hooked = model
        return super().loss(model, batch)


def drop_gradients(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(torch.zeros_like(bucket.buffer()))
    return future


@pytest.mark.parametrize("dropped", [False, True])
def test_a_hook_that_the_task_registers_sums_the_gradients_in_every_world(tmp_path: Path, dropped: bool) -> None:
    hooked = f"task={{target: '{__name__}:Hooked', args: {{dropped: {str(dropped).lower()}}}}}"
    run = drill(small(tmp_path, "parallel.reducer=torch", hooked), worlds=[3, 2], leave_after=[4])
    if not dropped:
        check_run(run, reference(small(tmp_path)))
        return
    with pytest.raises(AssertionError):
        check_run(run, reference(small(tmp_path)))
