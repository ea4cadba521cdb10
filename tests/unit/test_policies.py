"""What failures cost, as tables of what happened and what follows."""

import pytest

from steadfast.orchestration.policies import BrokenWorlds, Budgets, Quarantine


@pytest.mark.parametrize(
    ("limit", "failures", "ends"),
    [
        (2, [5, 5], False),
        (2, [5, 5, 5], True),
        (2, [5, 5, 6, 6, 7, 7], False),  # each new step starts the count anew
        (2, [9, 5, 6], True),  # steps that were done before are no progress
        (0, [100], True),
        (1, range(1000), False),
    ],
)
def test_a_row_of_failures_ends_the_run_and_progress_ends_the_row(limit: int, failures: list[int], ends: bool) -> None:
    budgets = Budgets({"worker": limit})
    *before, last = [budgets.spend("worker", step) for step in failures]
    assert (any(before), bool(last)) == (False, ends)


def test_kinds_have_budgets_of_their_own_and_a_preemption_costs_nothing() -> None:
    budgets = Budgets({"worker": 1, "oom": 1})
    assert {budgets.spend("preemption", 3) for _ in range(100)} == {None}
    assert [budgets.spend(kind, 3) for kind in ("worker", "oom")] == [None, None]
    why = budgets.spend("oom", 3)
    assert why == "2 failures (oom) and no step beyond 3; recovery allows 1 in a row"


@pytest.mark.parametrize(
    ("losses", "ends"),
    [
        ([(1, "worker")] * 64, False),  # a switch fails
        ([(1, "worker"), (1, "hang"), (1, "worker"), (1, "hang")], False),
        ([(1, "worker"), (2, "worker")], True),
        ([(1, "worker"), (1, "hang"), (2, "hang")], True),
        ([(0, "worker"), (1, "worker")], True),  # before the first attempt, and in it
    ],
)
def test_budget_counts_losses_of_one_attempt_once(losses: list[tuple[int, str]], ends: bool) -> None:
    budgets = Budgets({"worker": 1, "hang": 1})
    *before, last = [budgets.spend(kind, 5, attempt) for attempt, kind in losses]
    assert (any(before), bool(last)) == (False, ends)


@pytest.mark.parametrize(
    ("worlds", "ends"),
    [
        ("-", False),
        ("--", True),
        ("-s", False),
        ("s-", False),  # the first one has finished a step, and only the second one has not
        ("s--", True),
        (1000 * "-s", False),
        (1000 * "s", False),
    ],
)
def test_two_broken_worlds_in_a_row_without_a_step_end_the_run(worlds: str, ends: bool) -> None:
    policy = BrokenWorlds()
    verdicts = []
    for attempt, world in enumerate(worlds, 1):
        if world == "s":
            policy.stepped(attempt)
        verdicts.append(policy.count(attempt))
    assert [verdict for verdict in verdicts[:-1] if verdict] == []
    assert verdicts[-1] == ("2 attempts in a row broke before they had finished a step" if ends else None)


def test_a_node_on_which_workers_keep_dying_young_is_avoided_for_a_while() -> None:
    quarantine = Quarantine(failures=3, min_lifetime_s=20.0, cooldown_s=600.0)
    assert [quarantine.record_death("bad", 1.0, now_s, True) for now_s in (0.0, 10.0, 20.0)] == [False, False, True]
    assert quarantine.avoided(20.0) == ["bad"]
    assert quarantine.avoided(619.0) == ["bad"]
    assert quarantine.avoided(621.0) == []
    assert not quarantine.record_death("bad", 1.0, 700.0, True)  # counted anew


def test_deaths_far_apart_and_those_of_workers_that_have_trained_do_not_speak_against_their_node() -> None:
    quarantine = Quarantine(failures=2, min_lifetime_s=20.0, cooldown_s=600.0)
    lives = [(1.0, 0.0), (60.0, 100.0), (1.0, 110.0), (1.0, 811.0), (1.0, 820.0)]
    verdicts = [quarantine.record_death("node", lived_s, now_s, True) for lived_s, now_s in lives]
    assert verdicts == [False, False, False, False, True]


def test_a_node_that_computes_wrongly_is_avoided_at_once_and_the_only_one_never() -> None:
    quarantine = Quarantine(failures=3, cooldown_s=600.0)
    assert not quarantine.avoid("only", 0.0, elsewhere=False)
    assert quarantine.avoided(0.0) == []
    assert quarantine.avoid("bad", 1.0, elsewhere=True)
    assert quarantine.avoided(600.0) == ["bad"]
    assert quarantine.avoided(602.0) == []
    assert [quarantine.record_death("only", 1.0, now_s, elsewhere=False) for now_s in range(10)] == [False] * 10
    assert quarantine.record_death("only", 1.0, 10.0, elsewhere=True)
