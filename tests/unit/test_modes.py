"""Which modules train: what the user has set, but for a model that came in evaluation mode as a whole."""

import pytest
from torch import nn

from steadfast.loop.modes import evaluating, prepare_for_training


def model() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), nn.Linear(2, 2))


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_a_model_that_came_in_evaluation_mode_trains() -> None:
    pretrained = model().eval()
    assert prepare_for_training(pretrained) == ()
    assert all(modes(pretrained))


def test_parts_that_the_user_has_frozen_stay_so_and_are_named_once() -> None:
    frozen = model()
    frozen[0].eval()
    before = modes(frozen)
    assert prepare_for_training(frozen) == ("0",)
    assert modes(frozen) == before == [True, False, False, False, True]


def test_evaluation_gives_every_module_its_own_mode_back_whatever_happens() -> None:
    frozen = model()
    frozen[0].eval()
    before = modes(frozen)

    def validate() -> None:
        with evaluating(frozen):
            assert not any(modes(frozen))
            raise ValueError("of a task")

    with pytest.raises(ValueError, match="of a task"):
        validate()
    assert modes(frozen) == before
