"""How long a guess is waited for, as a table; what ending somebody would cost; and how late a watcher wakes."""

import pytest

from steadfast.liveness.verdicts import Costs, Guess, Price, patience_s
from steadfast.run import events
from tests.support.events import LOG

STALL_S = 60.0
CHEAP = Price(reform_s=2.0)
DEAR = Price(reform_s=90.0)
LAST = Price(reform_s=2.0, lost_steps=10, step_s=0.5)
LAST_AND_DEAR = Price(reform_s=2.0, lost_steps=1000, step_s=1.0)


@pytest.mark.parametrize(
    ("guess", "usual_s", "price", "stretch", "expected_s"),
    [
        # a rank that others wait for: the floor, what is usual, what re-forming costs; whichever is the longest
        (Guess.STUCK, 3.0, CHEAP, 1.0, 60.0),
        (Guess.STUCK, 200.0, CHEAP, 1.0, 200.0),
        (Guess.STUCK, 3.0, DEAR, 1.0, 90.0),
        (Guess.STUCK, 3.0, CHEAP, 2.5, 150.0),
        # nobody else holds the state
        (Guess.STUCK, 3.0, LAST, 1.0, 300.0),
        (Guess.STUCK, 3.0, LAST_AND_DEAR, 1.0, 1002.0),
        (Guess.ALL_WAIT, 3.0, CHEAP, 1.0, 60.0),
        (Guess.ALL_WAIT, 3.0, LAST, 1.0, 300.0),
        # slow code
        (Guess.SLOW, 3.0, CHEAP, 1.0, 600.0),
        (Guess.SLOW, 3.0, LAST_AND_DEAR, 1.0, 1002.0),
        # a stopped process, and a machine that is gone
        (Guess.SILENT, 5.0, CHEAP, 1.0, 60.0),
        (Guess.SILENT, 5.0, LAST, 1.0, 300.0),
        (Guess.UNREACHABLE, 5.0, Price(), 1.0, 5.0),
        (Guess.UNREACHABLE, 5.0, CHEAP, 2.0, 10.0),
        (Guess.UNREACHABLE, 5.0, LAST, 1.0, 7.0),
    ],
)
def test_how_long_a_guess_is_waited_for(
    guess: Guess, usual_s: float, price: Price, stretch: float, expected_s: float
) -> None:
    assert patience_s(guess, usual_s, price, STALL_S, stretch) == pytest.approx(expected_s)


@pytest.mark.parametrize("guess", Guess)
def test_to_wait_costs_no_less_than_being_wrong_would(guess: Guess) -> None:
    for lost_steps in (1, 100, 10_000):
        price = Price(3.0, lost_steps, 0.7)
        assert patience_s(guess, 3.0, price, hang_limit_s=0.1) >= price.seconds


def started(step: int, source: str, seconds: float = 1.0) -> events.AttemptStarted:
    parts = dict.fromkeys(("formed_s", "built_s", "restored_s", "first_step_s"), seconds / 4)
    return events.AttemptStarted(step=step, source=source, world_size=2, detected_s=9.0, **parts)


def checkpoint(step: int) -> events.Checkpoint:
    return events.Checkpoint(step=step, path="x", seconds=0.1, blocked_s=0.1, bytes=1)


def test_the_last_holder_costs_the_steps_since_the_newest_checkpoint_and_one_of_two_none() -> None:
    costs = Costs()
    costs.record(started(0, "start"))
    costs.reached(0, now_s=100.0)
    costs.reached(50, now_s=110.0)
    assert costs.price(["a"], ["a", "b"]) == Price(reform_s=1.0, lost_steps=0, step_s=0.2)
    assert costs.price(["a", "b"], ["a", "b"]) == Price(1.0, 50, 0.2)
    assert costs.price(["b"], ["b"]) == Price(1.0, 50, 0.2)
    costs.record(checkpoint(40))
    assert costs.price(["b"], ["b"]).lost_steps == 10
    # a survivor's state is no safer than before
    costs.record(started(50, "rank 0", seconds=3.0))
    assert costs.price(["b"], ["b"]) == Price(2.0, 10, 0.2)
    # what they have done since they were last heard of is not known
    costs.record(started(40, "checkpoint", seconds=3.0))
    assert costs.price(["b"], ["b"]).lost_steps == 1
    assert Costs().price(["b"], ["b"]).lost_steps == 0


def test_sharded_state_is_lost_with_any_member_but_for_a_copy_in_node_memory() -> None:
    costs = Costs()
    costs.record(events.ModelSharded(num_units=1, layers={}))
    costs.record(started(0, "start"))
    costs.reached(50, now_s=110.0)
    assert costs.price(["a"], ["a", "b", "c"]).lost_steps == 50
    assert costs.price([], ["a"]).lost_steps == 50
    costs.record(LOG.model_copy(update={"step": 48, "at_risk": {"workers": 5, "everything": 48}}))
    assert costs.price(["b"], ["b"]).lost_steps == 7
