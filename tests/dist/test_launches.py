"""The host launches little between the gate and the next forward, while the device has nothing to do."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

import steadfast
from steadfast.parallel.dtensor import is_sharded
from steadfast.parallel.precision import Precision
from steadfast.world.groups import Groups
from tests.dist.test_library import config_of
from tests.examples.script import line, squared_error

NUM_PARAMETERS = 42
NUM_STEPS = 5
SYNC = "_local_scalar_dense"  # which `item`, `bool` and `int` of a tensor call

LAUNCH_NOTHING = ("view", "select", "_record_function_enter_new", "_record_function_exit")


class Operation(NamedTuple):
    name: str
    on_gradients: bool
    on_dtensors: bool


class Launches(TorchDispatchMode):
    """Records the operations between the gate of each step and the next forward, one list a step."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[list[Operation]] = []
        self._model: nn.Module
        self._is_open = False
        self._gradients: set[int] = set()

    def follow(self, model: nn.Module) -> None:
        self._model = model
        model.register_forward_pre_hook(self._end)

    def begin(self) -> None:
        self._is_open = True
        self.steps.append([])
        self._gradients = {_storage(param.grad) for param in self._model.parameters() if param.grad is not None}

    def _end(self, *_: Any) -> None:
        self._is_open = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_open:
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            on_gradients = any(_storage(tensor) in self._gradients for tensor in tensors)
            self.steps[-1].append(Operation(func.overloadpacket.__name__, on_gradients, any(map(is_sharded, tensors))))
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part.untyped_storage().data_ptr()


class Whole(TensorDataset):
    """Samples of which nothing is masked."""

    counts_vary = False


def launches_of(monkeypatch: pytest.MonkeyPatch, storage: Path, kind: str, dataset: Any) -> list[list[Operation]]:
    """Train, and return the operations behind the gates of the steps that only train."""
    launches = Launches()

    def launch_a_kernel_a_group(run: Any) -> None:  # as on a GPU
        for group in run.optimizer.param_groups:
            group["fused"] = True

    hook = SimpleNamespace(setup=launch_a_kernel_a_group, on_start=lambda run: launches.follow(run.model))
    gate = Groups.gate

    def opened(groups: Groups) -> None:
        gate(groups)
        launches.begin()

    monkeypatch.setattr(Groups, "gate", opened)
    monkeypatch.setattr(Precision, "lag_steps", 1)  # numbers of a step are read in the next one
    config = config_of(
        str(storage),
        run={"name": "x", "storage": str(storage), "steps": NUM_STEPS, "report": False},
        batch={"global_size": 8, "microbatch_size": 4},
        checkpoint={"every": "1000 steps", "node_memory": False},
        parallel={"kind": kind},
    )
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(NUM_PARAMETERS // 2 - 1)], nn.Linear(4, 1))
    with launches:
        steadfast.fit(config, model=model, dataset=dataset, task=squared_error, hooks=[hook])
    return launches.steps[1 : NUM_STEPS - 1]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_host_launches_little_after_the_gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    steps = launches_of(monkeypatch, tmp_path, kind, Whole(*line(120).tensors))
    assert len(steps) == NUM_STEPS - 2
    for operations in steps:
        assert SYNC not in {each.name for each in operations}
        # The update of two groups; buckets that live on are set to zero, and a flag of each parameter to 1.
        passes = ["_fused_adamw_"] * 2
        if kind == "ddp":
            passes += ["_foreach_zero_", "_foreach_add_"]
        assert [each.name for each in operations if each.on_gradients] == passes
        assert not any(each.on_dtensors for each in operations)
        launches = [each for each in operations if each.name not in LAUNCH_NOTHING]
        assert len(launches) <= 20
        assert len(operations) - len(launches) <= NUM_PARAMETERS + 20


def test_a_count_that_varies_is_read_before_any_launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for operations in launches_of(monkeypatch, tmp_path, "ddp", line(120)):
        names = [each.name for each in operations]
        assert names.count(SYNC) == 1
        assert names[:2] == ["gt", SYNC]
