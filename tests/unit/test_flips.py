"""Bits that are flipped on purpose: which one, where, and once."""

import math

import pytest
import torch
from torch import Tensor, nn

from steadfast.config.faults import FlipAt
from steadfast.injection.flips import Flips, flip_bit


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_only_the_bit_that_is_meant_is_flipped_and_a_second_time_is_back(dtype: torch.dtype) -> None:
    tensor = torch.linspace(-1, 1, 12, dtype=dtype).view(3, 4)
    before = tensor.clone()
    width = 8 * tensor.element_size()
    for element, bit in ((0, 0), (5, width - 1), (11, width - 2)):
        flip_bit(tensor, element, bit)
        changed = (tensor != before).flatten().nonzero().flatten().tolist()
        assert changed == [element]
        flip_bit(tensor, element + 12, bit + width)  # counted on
        assert torch.equal(tensor, before)


def test_the_bits_of_a_number_are_those_of_the_standard() -> None:
    one = torch.ones(1)
    flip_bit(one, 0, 31)
    assert one.item() == -1.0
    flip_bit(one, 0, 31)
    flip_bit(one, 0, 30)
    assert one.item() == math.inf
    flip_bit(one, 0, 30)
    flip_bit(one, 0, 22)
    assert one.item() == 1.5
    whole = torch.ones(2, 3)
    flip_bit(whole.t(), 1, 31)  # a view that is not contiguous
    assert whole.tolist() == [[1, 1, 1], [-1, 1, 1]]


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def gradients(subject: nn.Module) -> list[Tensor]:
    subject.zero_grad(set_to_none=True)
    subject(torch.ones(2, 3)).sum().backward()
    return [parameter.grad.clone() for parameter in subject.parameters() if parameter.grad is not None]


def num_different(before: list[Tensor], after: list[Tensor]) -> int:
    return sum(int((one != other).sum()) for one, other in zip(before, after, strict=True))


def test_a_gradient_is_flipped_in_the_next_backward_alone() -> None:
    subject, flips = model(), Flips()
    honest = gradients(subject)
    for element in range(20):
        flips.strike(FlipAt(step=1, where="gradient", bit=20, element=element), subject)
        flipped = gradients(subject)
        assert num_different(honest, flipped) == 1
        assert num_different(honest, gradients(subject)) == 0


def test_an_activation_is_flipped_in_one_forward_and_the_backward_sees_it_too() -> None:
    subject, flips = model(), Flips()
    honest = gradients(subject)
    changed = set()
    for element in range(9):
        flips.strike(FlipAt(step=1, where="activation", bit=29, element=element), subject)
        changed.add(num_different(honest, gradients(subject)) > 0)
        assert num_different(honest, gradients(subject)) == 0
    assert changed == {True, False}  # that of the last layer has no part in any gradient of a sum


def test_a_weight_stays_flipped() -> None:
    subject, flips = model(), Flips()
    before = [parameter.detach().clone() for parameter in subject.parameters()]
    flips.strike(FlipAt(step=1, where="weight", bit=3, element=6), subject)
    after = [parameter.detach() for parameter in subject.parameters()]
    assert num_different(before, after) == 1
    assert all(parameter.grad_fn is None for parameter in subject.parameters())


def test_what_was_not_used_is_not_struck_later() -> None:
    subject, flips = model(), Flips()
    honest = gradients(subject)
    flips.strike(FlipAt(step=1, where="gradient"), subject)
    flips.strike(FlipAt(step=1, where="activation", bit=29), subject)
    flips.forget()
    assert num_different(honest, gradients(subject)) == 0
