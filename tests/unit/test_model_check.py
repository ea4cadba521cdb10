"""What a checkpoint cannot hold is refused by name before the first step; copies in a state_dict are carried."""

import io
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from steadfast.checkpoint.model_check import refuse_lossy_copies, refuse_unsaved
from steadfast.checkpoint.state import ModelState, copies_in, flatten
from steadfast.config import parse_config
from steadfast.errors import ConfigError
from steadfast.loop.worker_state import WorkerState
from tests.support.models import Extra, Fused
from tests.support.reference import CPU


def with_tensor(tensor: Tensor, persistent: bool = True) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    module.register_buffer("table", tensor, persistent)
    return module


COMPLEX = nn.ParameterDict({"w": torch.zeros(2, dtype=torch.complex64)})
REFUSED = {
    "its parameter 0.weight is not initialized, as in a lazy layer": nn.Sequential(nn.LazyLinear(2)),
    "its parameter w is complex64, a type that checkpoints cannot hold: keep it as torch.view_as_real": COMPLEX,
    "its buffer table is complex128, .* persistent=False": with_tensor(torch.zeros(2, dtype=torch.complex128)),
    "its buffer table is sparse": with_tensor(torch.eye(2).to_sparse()),
    r"get_extra_state\(\) of 0 \(Extra\) returns a dict": nn.Sequential(Extra({"calls": 1})),
    r"get_extra_state\(\) of Extra returns a int": Extra(3),
}


@pytest.mark.parametrize("message", REFUSED)
@pytest.mark.parametrize("replicated", [True, False])
def test_what_no_checkpoint_can_hold_is_refused_by_name(message: str, replicated: bool) -> None:
    with pytest.raises(ConfigError, match=f"model: {message}"):
        refuse_unsaved(REFUSED[message], replicated)


def test_other_models_are_accepted() -> None:
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    tables = [torch.zeros(2, dtype=torch.complex64), torch.eye(2).to_sparse()]
    kinds = [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.bool, torch.bfloat16]
    accepted = [
        *(tied, nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)), nn.LSTM(2, 2), nn.BatchNorm1d(2)),
        *(with_tensor(table, persistent=False) for table in tables),
        *(with_tensor(torch.zeros(3).to(kind)) for kind in kinds),
    ]
    empty: list[object] = [None, {}, b"", io.BytesIO(), torch.zeros(0)]
    accepted += map(Extra, empty)
    for model in accepted:
        for replicated in (True, False):
            refuse_unsaved(model, replicated)
        refuse_lossy_copies(model)
    refuse_unsaved(Fused(), replicated=True)
    refuse_unsaved(Extra(torch.ones(1)), replicated=True)


@pytest.mark.parametrize("model", [Fused(), Fused(split=lambda part: part), nn.Sequential(Extra(torch.ones(1)))])
def test_a_model_whose_state_dict_is_made_by_hooks_is_refused_under_fsdp(model: nn.Module) -> None:
    name = next(iter(copies_in(model, model.state_dict())))
    with pytest.raises(ConfigError, match=rf"the entry {re.escape(name)} of its state_dict\(\).*parallel\.kind=ddp"):
        refuse_unsaved(model, replicated=False)


def test_a_state_dict_that_does_not_come_back_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"loaded again, changes fused"):
        refuse_lossy_copies(Fused(split=lambda part: part.bfloat16()))
    with pytest.raises(ConfigError, match=r'does not take its own state_dict\(\).*Missing key\(s\).*"fused"'):
        refuse_lossy_copies(Fused(joins=False))


@pytest.mark.parametrize("make", [Fused, lambda: Fused(split=lambda part: part), lambda: Extra(torch.zeros(2))])
def test_copies_in_a_state_dict_follow_the_model_and_reach_it(make: Callable[[], nn.Module]) -> None:
    """As a checkpoint, a snapshot and a hand-over to a new worker need them."""
    first, second = make(), make()
    refuse_lossy_copies(first)
    held, other = (ModelState(each, trainable_only=False) for each in (first, second))
    saved, restored = flatten(held.state_dict()), flatten(other.state_dict())
    with torch.no_grad():
        for param in first.parameters():
            param.add_(1)  # a step
    if isinstance(first, Extra):
        first.extra = first.extra + 5
    held.refresh()
    for name, tensor in restored.items():
        tensor.copy_(saved[name])
    other.load_copies()
    for one, copied in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(one, copied)
    torch.testing.assert_close(dict(first.named_parameters()), dict(second.named_parameters()), rtol=0, atol=0)


def test_a_lazy_layer_is_refused_before_the_optimizer_is_tried() -> None:
    text = """
    run: {steps: 1}
    model: {target: "tests.unit.test_model_check:lazy"}
    data: {target: "tests.programs.nadam:data", validation_fraction: 0}
    task: {target: "tests.programs.nadam:Task"}
    optimizer: {target: "torch.optim:Adam"}
    """
    for kind in ("ddp", "fsdp"):
        with pytest.raises(ConfigError, match=r"its parameter 0\.weight is not initialized"):
            WorkerState(parse_config(text, "run.yaml", [f"parallel.kind={kind}"]), CPU)


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(1))
