"""Which modules train, and that train() and eval() are called as a plain loop calls them."""

from typing import Any, Self

import pytest
import torch
from torch import nn

from steadfast.loop.modes import evaluating, prepare_for_training


def model() -> Any:
    return nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), nn.Linear(2, 2))


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


class FrozenNorm(nn.Module):
    """Keeps its normalization in evaluation mode, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(2), nn.Linear(2, 2)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.norm.eval()
        return self


class Merging(nn.Linear):
    """Adds its update to the weight for evaluation, and subtracts it for training, as LoRA does."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.delta, self.merged = torch.ones(2, 2), False

    def train(self, mode: bool = True) -> Self:
        if mode == self.merged:
            self.weight.data += self.delta * (-1 if self.merged else 1)
            self.merged = not self.merged
        return super().train(mode)


def test_parts_that_the_user_has_frozen_stay_so_and_are_named_once() -> None:
    pretrained = model().eval()
    assert prepare_for_training(pretrained) == ()
    assert all(modes(pretrained)), "a model that came in evaluation mode as a whole trains"
    frozen = model()
    frozen[0].eval()
    before = modes(frozen)
    assert prepare_for_training(frozen) == ("0",)
    assert modes(frozen) == before == [True, False, False, False, True]


def test_methods_of_modules_are_called_before_the_first_step_and_around_an_evaluation() -> None:
    detector: nn.Module = FrozenNorm()
    adapted: Any = nn.Sequential(Merging(), model())
    assert prepare_for_training(detector) == ("norm",)
    weight = adapted[0].weight.detach().clone()
    adapted[1][0].eval()
    assert prepare_for_training(adapted) == ("1.0",)
    for each in (detector, adapted):
        before = modes(each)
        with evaluating(each):
            assert not any(modes(each))
            assert torch.equal(adapted[0].weight, weight + 1) == (each is adapted)
        assert modes(each) == before
    torch.testing.assert_close(adapted[0].weight.detach(), weight)


def test_modules_that_a_hook_has_switched_since_keep_their_modes_whatever_happens() -> None:
    switched: Any = nn.Sequential(model(), nn.Dropout())
    prepare_for_training(switched)
    switched[0].eval()
    switched[0][0][0].train()  # one layer of a part in evaluation mode trains
    before = modes(switched)
    with evaluating(switched):
        assert not any(modes(switched))
    assert modes(switched) == before
    with pytest.raises(ValueError, match="of a task"), evaluating(switched):
        raise ValueError("of a task")
    assert modes(switched) == before
