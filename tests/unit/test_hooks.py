"""Hooks without a world."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from steadfast.config import EarlyStoppingConfig, EmaConfig, parse_config
from steadfast.hooks.early_stopping import EarlyStopping
from steadfast.hooks.ema import Ema
from steadfast.hooks.hook import HookContext
from steadfast.hooks.hooks import Hooks

CPU = torch.device("cpu")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight


def context(model: nn.Module) -> HookContext:
    return HookContext(model, cast(Any, None))


def test_a_parameter_with_two_names_is_averaged_once_and_found_under_both() -> None:
    run = context(Tied())
    first = run.model.get_parameter("embed.weight").detach().clone()
    ema = Ema(EmaConfig(decay=0.5))
    ema.setup(run)
    ema.on_start(run)
    with torch.no_grad():
        run.model.get_parameter("embed.weight").add_(1.0)
    ema.on_step(run)
    averages = cast(dict[str, Tensor], ema.state_dict()["averages"])
    assert list(averages) == ["embed.weight", "head.weight"]
    torch.testing.assert_close(averages["head.weight"], first + 0.5)
    assert averages["embed.weight"] is averages["head.weight"]


def test_weights_come_back_when_a_validation_fails() -> None:
    run = context(Tied())
    ema = Ema(EmaConfig())
    ema.setup(run)
    with torch.no_grad():
        run.model.get_parameter("embed.weight").add_(1.0)
    own = run.model.get_parameter("embed.weight").detach().clone()

    def validate() -> None:
        with ema.validating(run):
            torch.testing.assert_close(run.model.get_parameter("embed.weight").detach(), own - 1.0)
            raise ValueError("in a validation")

    with pytest.raises(ValueError, match="in a validation"):
        validate()
    assert torch.equal(run.model.get_parameter("embed.weight"), own)


@pytest.mark.parametrize(
    ("mode", "losses", "ends_at"),
    [
        ("min", [3.0, 2.0, 2.0, 2.1, 1.0], 3),  # as good is not better
        ("min", [3.0, 2.0, 2.1, 1.9, 2.0, 1.89], 5),  # by less than min_delta is not either
        ("max", [0.1, 0.2, 0.3, 0.4], None),
        ("min", [float("nan"), float("nan")], 1),
    ],
)
def test_early_stopping(mode: str, losses: list[float], ends_at: int | None) -> None:
    config = EarlyStoppingConfig.model_validate({"mode": mode, "patience": 2, "min_delta": 0.05})
    ended = None
    hook = EarlyStopping(config)
    for index, loss in enumerate(losses):
        run = context(nn.Identity())
        hook.on_validation(run, {"loss": loss})
        if run.ended_early and ended is None:
            ended = index
        # What another process goes on with.
        other = EarlyStopping(config)
        other.load_state_dict(hook.state_dict())
        hook = other
    assert ended == ends_at


def test_hooks_of_one_class_have_states_of_their_own() -> None:
    config = parse_config("hooks: [{kind: ema, decay: 0.9}, {kind: early_stopping}, {kind: ema, decay: 0.5}]")
    hooks = Hooks(config.hooks, CPU)
    hooks.setup(Tied(), cast(Any, None))
    assert list(hooks.state_dict()) == ["Ema", "EarlyStopping", "Ema2", "common"]
    assert hooks.state_dict()["EarlyStopping"]["best"].dtype == torch.float64
    held = hooks.state_dict()["Ema2"]["averages"]["embed.weight"]
    hooks.on_step(1)
    assert hooks.state_dict()["Ema2"]["averages"]["embed.weight"] is held


class A:
    def state_dict(self) -> dict[str, int]:
        return {"own": 1}


class A2(A):
    pass


class A5(A):
    pass


@pytest.mark.parametrize(
    ("classes", "names"),
    [
        ([A, A, A], ["A", "A2", "A3"]),
        ([A, A2, A], ["A", "A2", "A3"]),
        ([A5, A], ["A5", "A2"]),  # a run begun with 0.2 has these names too
        ([A2, A], ["A2", "A3"]),
        ([A2, A2], ["A2", "A22"]),
        ([A, A, A2], ["A", "A2", "A22"]),
        ([A2, A, A], ["A2", "A3", "A4"]),
    ],
)
def test_no_hook_takes_the_name_of_another(classes: list[type], names: list[str]) -> None:
    found = [f"{{target: 'tests.unit.test_hooks:{each.__name__}'}}" for each in classes]
    hooks = Hooks(parse_config(f"hooks: [{', '.join(found)}]").hooks, CPU)
    assert list(hooks.state_dict()) == names
