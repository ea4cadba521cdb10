"""Which losses are bad, and what follows: ordinary curves of many kinds raise no alarm, spikes in them do."""

import math
import pickle
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from steadfast.config import RecoveryConfig
from steadfast.guards.numerics import BadStep, Ignore, Numerics, Rollback, Stop, is_spike, steps_to_skip
from steadfast.run.ledger import PastLosses, StepStats

Floats = NDArray[np.float64]
STEPS = np.arange(10_000.0)
DENSITY = "log-likelihood of a density"


def agreed(step: int, loss: float, grad_norm: float = 1.0) -> StepStats:
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    return StepStats(step, loss, 1, grad_norm, num_samples=1, samples_digest=0, finite=finite)


def past(losses: list[float]) -> PastLosses:
    return PastLosses(losses, losses)


def alarms(losses: Floats, first: int = 1) -> list[int]:
    numerics = Numerics(RecoveryConfig(max_skipped_steps=10**6), frozenset(), PastLosses())
    return [step for step, loss in enumerate(losses.tolist(), first) if numerics.judge(agreed(step, loss))]


def falling(floor: float, noise: float, tau: float = 300.0) -> Callable[[np.random.Generator], Floats]:
    """From ln 50257 down to `floor`; noise is relative."""
    return lambda draw: (floor + (10.8 - floor) * np.exp(-STEPS / tau)) * np.exp(noise * draw.standard_normal(10_000))


ORDINARY: dict[str, Callable[[np.random.Generator], Floats]] = {
    "language model": falling(2.3, 0.02),
    "small batches": falling(2.3, 0.15),
    "very steep start": falling(1.5, 0.03, tau=8.0),
    "warm-up noise": lambda draw: 6.0 + 4.0 * np.exp(-STEPS / 40) * np.abs(draw.standard_normal(10_000)),
    "plateau without noise": lambda draw: np.full(10_000, 2.3) + 1e-9 * draw.standard_normal(10_000),
    "plateau, then a bump of a half": lambda draw: np.where(STEPS == 5_000, 3.4, 2.3),
    "fit to almost nothing": lambda draw: 2.3 * np.exp(-STEPS / 500) + 1e-3 * np.exp(draw.standard_normal(10_000)),
    "one sample in fifty is hard": lambda draw: (
        2.3 * np.exp(-STEPS / 100) + 0.01 + 0.3 * (draw.random(10_000) < 0.02) * draw.random(10_000)
    ),
    "two kinds of data": lambda draw: (
        np.where(draw.random(10_000) < 0.1, 3.2, 1.6) + 0.05 * draw.standard_normal(10_000)
    ),
    "heavy tails": lambda draw: 2.0 + 0.1 * np.abs(draw.standard_t(5, 10_000)),
    "slow rise": lambda draw: 2.0 * np.exp(STEPS / 10_000) + 0.02 * draw.standard_normal(10_000),
    "waves": lambda draw: 2.0 + 0.8 * np.sin(STEPS / 15) + 0.05 * draw.standard_normal(10_000),
    "another task from step 5000 on": lambda draw: (
        np.where(STEPS < 5_000, 2.0, 3.2) + 0.1 * draw.standard_normal(10_000)
    ),
    DENSITY: lambda draw: -3.2 * (1 - np.exp(-STEPS / 300)) + 0.1 * draw.standard_normal(10_000),
    "around zero": lambda draw: 0.3 * draw.standard_normal(10_000),
    "all masked now and then": lambda draw: np.where(draw.random(10_000) < 0.01, 2.0, 2.1),
}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
@pytest.mark.parametrize("curve", ORDINARY)
def test_ordinary_curves_raise_no_alarm(curve: str, seed: int) -> None:
    assert alarms(ORDINARY[curve](np.random.default_rng(seed))) == []


FACTORS = {"language model": 4, "small batches": 8, "plateau without noise": 4, "slow rise": 4, DENSITY: -13}


@pytest.mark.parametrize("curve", FACTORS)
def test_a_spike_in_an_ordinary_curve_is_found_at_its_step(curve: str) -> None:
    losses = ORDINARY[curve](np.random.default_rng(0))
    where = [2_000, 4_000, 9_000]  # while the curve falls steeply, a loss must be higher than any that was there lately
    for step in where:
        losses[step - 1] *= FACTORS[curve]
    assert alarms(losses) == where


@pytest.mark.parametrize(
    ("loss", "recent", "most", "expected"),
    [
        (9.1, [2.3] * 31, 10.0, False),  # too few to say
        (9.1, [2.3] * 32, 10.0, True),
        (4.5, [2.3] * 128, 10.0, False),  # not quite doubled
        (4.7, [2.3] * 128, 10.0, True),
        (3.4, [2.3] * 128, 5.0, True),  # a square root of two
        (3.1, [2.3] * 128, 5.0, False),
        (9.1, [2.3] * 127 + [9.2], 10.0, False),  # one like it was ordinary
        (9.1, [2.3] * 127 + [4.6], 10.0, False),  # twice the excess of one that was
        (9.3, [2.3] * 127 + [4.6], 10.0, True),
        (math.inf, [2.3] * 128, 10.0, True),
        (math.nan, [2.3] * 128, 10.0, False),
    ],
)
def test_the_rule(loss: float, recent: list[float], most: float, expected: bool) -> None:
    assert is_spike(loss, recent, most) is expected


LAST_BIT = 2.0**-28  # of a mean over 32 losses in float32


def test_of_a_run_that_has_learnt_all_by_heart_the_last_bits_are_no_spikes() -> None:
    draw = np.random.default_rng(0)
    learning = 6.24 * np.exp(-np.arange(1000.0) / 30)
    # As such a run has it: multiples of the last bit, most of them one or none, and fifty now and then.
    learnt = LAST_BIT * np.round(np.exp(2 * draw.standard_normal(9_000)))
    losses = np.concatenate([np.maximum(learning, LAST_BIT), learnt])
    assert alarms(losses) == []
    losses[5_000] = 0.5
    assert alarms(losses) == [5_001]


def test_a_loss_below_a_thousandth_of_the_first_losses_is_no_spike() -> None:
    learning = 2.3 * np.exp(-np.arange(2000.0) / 60) + 1.7e-8
    bumps = [1_000, 1_300, 1_600, 1_900]
    losses = learning.copy()
    losses[bumps] = [2e-4, 9e-4, 1e-3, 2.2e-3]  # Adam at a constant rate; each is higher than all losses of its window
    assert alarms(losses) == []
    losses[1_950] = 0.05
    assert alarms(losses) == [1_951]


def test_what_is_not_finite_is_rolled_back_from_the_first_step_on() -> None:
    numerics = Numerics(RecoveryConfig(), frozenset(), PastLosses())
    assert numerics.judge(agreed(1, 2.0)) is None
    assert numerics.judge(agreed(2, math.nan)) == Rollback((2,), "loss nan, gradient norm 1 at step 2")
    assert numerics.judge(agreed(2, 2.0, math.inf)) == Rollback((2,), "loss 2, gradient norm inf at step 2")


@pytest.mark.parametrize("past_losses", [PastLosses(), past([2.3] * 32)], ids=["first", "later"])
def test_a_step_in_which_everything_is_masked_is_no_fault_and_hides_none(past_losses: PastLosses) -> None:
    numerics = Numerics(RecoveryConfig(), frozenset(), past_losses)
    assert numerics.judge(StepStats(1, math.nan, 0, 0.0, 8, 0, finite=True)) is None
    assert [numerics.judge(agreed(step, 2.3)) for step in range(2, 66)] == [None] * 64
    assert isinstance(numerics.judge(agreed(66, 9.1)), Rollback)


def test_what_was_before_the_attempt_counts_also_the_losses_of_the_first_steps() -> None:
    assert Numerics(RecoveryConfig(), frozenset(), past([2.3] * 64)).judge(agreed(65, 9.1)) == Rollback(
        (65,), "loss 9.1 against a median of 2.3 at step 65"
    )
    assert Numerics(RecoveryConfig(), frozenset(), PastLosses()).judge(agreed(65, 9.1)) is None
    assert Numerics(RecoveryConfig(spike=None), frozenset(), past([2.3] * 64)).judge(agreed(65, 9.1)) is None
    learnt = [LAST_BIT] * 64
    assert Numerics(RecoveryConfig(), frozenset(), PastLosses([6.24] * 32, learnt)).judge(agreed(65, 1.9e-7)) is None
    assert isinstance(Numerics(RecoveryConfig(), frozenset(), past(learnt)).judge(agreed(65, 1.9e-7)), Rollback)


@pytest.mark.parametrize(
    ("step", "skip", "expected"),
    [
        (9, set(), (9,)),
        (9, {7}, (9,)),
        (9, {8}, (7, 9)),
        (9, {8, 7, 5}, (6, 9)),
        (3, {1, 2}, (3,)),
    ],
)
def test_the_step_before_those_left_out_is_a_suspect(step: int, skip: set[int], expected: tuple[int, ...]) -> None:
    assert steps_to_skip(step, frozenset(skip)) == expected


@pytest.mark.parametrize(
    ("skip", "budget", "loss", "expected"),
    [
        (set(), 1, math.nan, Rollback),
        (set(), 0, math.nan, Stop),
        (set(), 0, 9.1, Ignore),
        ({1500, 1600, 1700}, 4, math.nan, Rollback),
        ({1500, 1600, 1700}, 3, math.nan, Stop),
        ({1500, 1600, 1700}, 3, 9.1, Ignore),
        ({900, 999, 1700}, 2, math.nan, Rollback),  # two of them are long ago
        ({1999}, 2, math.nan, Stop),  # it would take two
        ({1999}, 3, math.nan, Rollback),
        ({2500}, 1, math.nan, Rollback),  # a step that an earlier attempt got to
    ],
)
def test_the_budget(skip: set[int], budget: int, loss: float, expected: type) -> None:
    numerics = Numerics(RecoveryConfig(max_skipped_steps=budget), frozenset(skip), past([2.3] * 64))
    assert isinstance(numerics.judge(agreed(2000, loss)), expected)


def test_a_fault_that_stays_spends_the_budget_and_then_says_what_to_do() -> None:
    skip: frozenset[int] = frozenset()
    taken = []
    for step in range(50, 60):
        match Numerics(RecoveryConfig(), skip, PastLosses()).judge(agreed(step, math.nan)):
            case Rollback(steps, _):
                taken.append(steps)
                skip |= frozenset(steps)
            case Stop(why):
                assert "5 steps are left out already" in why
                assert "Lower optimizer.lr" in why
                break
    assert taken == [(50,), (49, 51), (48, 52)]


def test_a_loss_that_stays_high_is_let_pass_once() -> None:
    numerics = Numerics(RecoveryConfig(max_skipped_steps=0), frozenset(), past([2.3] * 128))
    said = [numerics.judge(agreed(step, 9.1)) for step in range(1, 500)]
    assert [isinstance(each, Ignore) for each in said] == [True] + [False] * 498
    assert all(one is None for one, _ in list(pairwise(said))[1:])


def test_a_bad_step_travels_between_processes() -> None:
    error = pickle.loads(pickle.dumps(BadStep((7, 9), "loss nan")))
    assert (error.steps, str(error)) == ((7, 9), "loss nan; a new attempt leaves out step 7 and 9")
