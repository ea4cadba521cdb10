"""Gradients as integers: any order gives one sum, its error has a bound, and what does not fit is told."""

import math
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from steadfast.loop.totals import ExactTotals, Totals
from steadfast.parallel.fixed_point import FixedPoint, _power_of_two
from steadfast.tasks import Mean, Sums
from steadfast.world.sums import OrderFree, Plain

CPU = torch.device("cpu")
UNUSED = torch.zeros(())  # the gradient's norm, which tells a sum of integers nothing


def total_of(fixed: FixedPoint, terms: list[Tensor]) -> Tensor:
    total = fixed.empty(terms[0])
    for index, term in enumerate(terms):
        fixed.add(total, term.clone(), first=index == 0)
    return total


def sum_of(fixed: FixedPoint, terms: list[Tensor]) -> Tensor:
    found = torch.empty_like(terms[0])
    fixed.store(total_of(fixed, terms), found)
    return found


def adapted(num_terms: int, terms: list[Tensor]) -> FixedPoint:
    """After a step with these terms."""
    fixed = FixedPoint(num_terms, CPU)
    magnitude, before = fixed.state_dict()["magnitude"], None
    while before is None or not torch.equal(before, magnitude):  # it falls by one in a step
        before = magnitude.clone()
        sum_of(fixed, terms)
        if fixed.overflowed(UNUSED):
            fixed.after_overflow()
        else:
            fixed.after_update()
    return fixed


def spread_out(seed: int, num_terms: int, size: int = 40, decades: float = 6.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scale = 10 ** (-decades * torch.rand(size, generator=generator, dtype=torch.float64))
    terms = torch.randn(num_terms, size, generator=generator, dtype=torch.float64) * scale
    return list(terms.float())


@given(seed=st.integers(0, 2**32), num_terms=st.integers(1, 70), exponent=st.integers(-40, 40))
def test_the_error_stays_within_the_bound_that_is_stated(seed: int, num_terms: int, exponent: int) -> None:
    terms = [term * 2.0**exponent for term in spread_out(seed, num_terms)]
    fixed = adapted(num_terms, terms)
    exact = torch.stack(terms).double().sum(0)
    error = (sum_of(fixed, [term.double() for term in terms]) - exact).abs().max().item()
    # |x| < 2^m for each element x of the gradients before; see the docstring of FixedPoint
    m = math.frexp(exact.abs().max().item())[1]
    assert error <= num_terms * 2.0 ** (m + 16 + math.ceil(math.log2(max(num_terms, 2))) - 63)


@given(seed=st.integers(0, 2**32))
def test_sums_in_fp32_are_as_near_to_the_true_ones_as_ordinary_ones(seed: int) -> None:
    terms = spread_out(seed, 16, decades=3.0)
    exact = torch.stack(terms).double().sum(0)
    found = sum_of(adapted(16, terms), terms)
    assert (found.double() - exact).abs().max().item() <= exact.abs().max().item() * 2.0**-24
    ordinary = torch.zeros_like(terms[0])
    for term in terms:
        ordinary += term
    assert (found.double() - exact).norm() <= (ordinary.double() - exact).norm()


@given(seed=st.integers(0, 2**32), cut=st.integers(0, 9))
def test_neither_the_order_nor_how_terms_are_shared_out_changes_a_bit(seed: int, cut: int) -> None:
    terms = spread_out(seed, 9)
    shuffled = [terms[index] for index in np.random.default_rng(seed).permutation(9)]
    fixed = adapted(9, terms)
    alone = sum_of(fixed, terms)
    by_two = torch.zeros_like(fixed.empty(terms[0]))
    for of_rank in (shuffled[:cut], shuffled[cut:]):
        by_two += total_of(fixed, of_rank) if of_rank else 0
    found = torch.empty_like(alone)
    fixed.store(by_two, found)
    assert torch.equal(found, alone)
    # Which is not so of the sums of floats.
    plain = {sum(order, torch.zeros(40)).numpy().tobytes() for order in permutations(terms[:4])}
    assert len(plain) > 1 or seed % 97 == 0


def test_a_term_that_does_not_fit_is_told_and_the_next_one_has_room() -> None:
    fixed = FixedPoint(4, CPU)
    huge = torch.tensor([1.0, 2.0**17])
    assert sum_of(fixed, [torch.ones(2), huge]).isnan().all()
    assert fixed.overflowed(UNUSED)
    fixed.after_overflow()
    assert torch.equal(sum_of(fixed, [torch.ones(2), huge]), huge + 1)
    assert not fixed.overflowed(UNUSED)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so_and_is_no_overflow(number: float) -> None:
    fixed = FixedPoint(4, CPU)
    assert sum_of(fixed, [torch.ones(2), torch.tensor([number, 0.0])]).isnan().all()
    assert not fixed.overflowed(UNUSED)
    fixed.after_update()
    assert torch.equal(sum_of(fixed, [torch.ones(2)]), torch.ones(2))


class Asked(TorchDispatchMode):
    """Fails where the host reads a number from the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func)
        return func(*args, **(kwargs or {}))


def test_the_host_does_not_wait_for_the_device_while_terms_are_added() -> None:
    fixed, terms = FixedPoint(2, CPU), [torch.ones(3), torch.full((3,), 2.0)]
    with Asked():  # type: ignore[no-untyped-call]
        found = sum_of(fixed, terms)
    assert found.tolist() == [3.0] * 3


@pytest.mark.parametrize("exponent", [-108, -1, 0, 46, 126])
def test_powers_of_two_are_exact(exponent: int) -> None:
    assert float(_power_of_two(torch.tensor(exponent))) == 2.0**exponent


def test_terms_as_large_as_they_may_be_do_not_wrap() -> None:
    for num_terms in (1, 2, 3, 48, 4096):
        fixed = FixedPoint(num_terms, CPU)
        largest = torch.tensor([math.nextafter(2.0**16, 0.0)], dtype=torch.float64)
        found = sum_of(fixed, [largest] * num_terms)
        assert not fixed.overflowed(UNUSED)
        assert found.item() == pytest.approx(largest.item() * num_terms, rel=1e-12)


def test_the_unit_follows_gradients_down_slowly_and_up_at_once() -> None:
    fixed = FixedPoint(2, CPU)
    state = fixed.state_dict()["magnitude"]
    seen = []
    for size in (1.0, 2.0**-20, 0.0, 2.0**-20, 2.0**10):
        sum_of(fixed, [torch.full((3,), size)])
        fixed.after_update()
        seen.append(int(state))
    assert seen == [1, 0, 0, -1, 11]  # a step of zeros tells nothing
    for _ in range(200):
        sum_of(fixed, [torch.full((3,), 1e-37)])
        fixed.after_update()
    assert int(state) == -80
    fixed.begin_anew()
    assert int(state) == 0


def test_a_restored_unit_is_the_one_that_is_used() -> None:
    first, second = adapted(4, [torch.full((3,), 1e-9)]), FixedPoint(4, CPU)
    second.begin()
    second.state_dict()["magnitude"].copy_(first.state_dict()["magnitude"])
    term = torch.tensor([1.2345e-9, 3e-13, -1e-10])
    assert torch.equal(total_of(first, [term]), total_of(second, [term]))


@given(st.lists(st.floats(-1e15, 1e15), min_size=1, max_size=30), st.randoms())
def test_losses_add_up_to_the_same_in_any_order(losses: list[float], random: object) -> None:
    numbers = [torch.tensor(loss, dtype=torch.float64) for loss in losses]
    parts = [OrderFree.split(number) for number in numbers]
    forwards, backwards = (torch.stack(ordered).sum(0) for ordered in (parts, parts[::-1]))
    assert torch.equal(forwards, backwards)
    found = OrderFree.join(forwards.tolist())
    assert found == pytest.approx(math.fsum(losses), rel=1e-12, abs=len(losses) * 2.0**-60)


def test_a_single_number_comes_back_as_it_was_and_what_is_not_finite_stays_so() -> None:
    for number in (0.0, 1.0, -2.5, math.pi, 1e-10, 1e18):
        parts = OrderFree.split(torch.tensor(number, dtype=torch.float64))
        assert OrderFree.join(parts.tolist()) == pytest.approx(number, rel=1e-15, abs=2.0**-60)
    for number in (math.nan, math.inf):
        parts = OrderFree.split(torch.tensor(number, dtype=torch.float64))
        assert not math.isfinite(OrderFree.join(parts.tolist()))
    assert Plain.join(Totals(CPU).parts(torch.tensor(0.1)).tolist()) == pytest.approx(0.1, rel=1e-7)


@pytest.mark.parametrize("kind", [Totals, ExactTotals])
def test_numbers_of_python_are_added_in_float64(kind: type[Totals]) -> None:
    totals = kind(CPU)
    totals.add(Sums(torch.tensor(1.0), 1, {"share": Mean(0.1, 3)}), weight=1)
    total, count = totals.metrics(["share"])
    found = [kind.summation.join(parts.tolist()) for parts in (total, count)]
    assert found == [pytest.approx(0.1, rel=1e-15), 3.0]
