"""What a loss would cost, in steps."""

from __future__ import annotations

import pytest

from app.checkpoint.snapshots import AtRisk
from app.components.trigger import Interval
from app.config import Every


@pytest.mark.parametrize(
    ("replicated", "num_ranks", "num_nodes", "expected"),
    [
        (True, 1, 1, AtRisk(3, 3, 60, 60)),
        (True, 2, 1, AtRisk(0, 3, 60, 60)),
        (True, 2, 2, AtRisk(0, 0, 0, 60)),
        (False, 1, 1, AtRisk(3, 3, 60, 60)),
        (False, 2, 1, AtRisk(3, 3, 60, 60)),
        (False, 4, 2, AtRisk(3, 3, 3, 60)),
    ],
)
def test_a_loss_costs_the_steps_since_the_newest_state_elsewhere(
    replicated: bool, num_ranks: int, num_nodes: int, expected: AtRisk
) -> None:
    found = AtRisk.of(100, newest=97, committed=40, replicated=replicated, num_ranks=num_ranks, num_nodes=num_nodes)
    assert found == expected


@pytest.mark.parametrize("every", [Every(5, "minutes"), Every(1000, "steps")])
def test_an_act_that_is_due_at_once_is_requested_once(every: Every) -> None:
    trigger = Interval(every, 100.0, clock=lambda: 0.0)
    assert not trigger.wanted()
    trigger.hurry()
    assert trigger.wanted()
    assert not trigger.wanted()
    trigger.done()
    assert not trigger.wanted()
