"""A third of an hour full of what looks like a hang and is none, over a clock that is turned: nothing ends."""

from tests.benchmarks.alarms import simulate


def test_slow_steps_frozen_storage_and_stopped_processes_end_nothing_and_true_hangs_are_named() -> None:
    assert simulate(hours=0.35, hangs=3, seed=7) == 0
