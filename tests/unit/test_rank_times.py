"""What a step costs each rank by itself, by the reports that heartbeats bring."""

from collections.abc import Sequence

from steadfast.liveness.rank_times import RankTimes
from steadfast.run import events
from steadfast.world.report import ProgressReport


def report(rank: int, step: int, spent_s: dict[str, float], attempt: int = 1, device_s: float = 0.0) -> ProgressReport:
    return ProgressReport(attempt, rank, [step, 0, 0, 0, 0], step, "forward", 0.0, None, spent_s, device_s)


def watch(
    times: RankTimes,
    seconds: float,
    own_s: Sequence[float],
    from_s: float = 0.0,
    attempt: int = 1,
    first_step: int = 1,
) -> list[tuple[float, events.RankTimes]]:
    """Look every second at ranks that do two steps in it, each with its own seconds of a step."""
    told: list[tuple[float, events.RankTimes]] = []
    for second in range(int(seconds) + 1):
        step = first_step + 2 * second
        # Half of it in the loader. What a rank waits for others is not its own.
        world = {}
        for rank, each_s in enumerate(own_s):
            half_s = each_s * step / 2
            spent_s = {"loader": half_s, "forward": half_s, "gradients": 9.0 * step}
            world[f"m{rank}"] = report(rank, step, spent_s, attempt)
        if found := times.look(world, from_s + second):
            told.append((from_s + second, found))
    return told


def test_the_slowest_rank_is_the_last_and_times_are_told_ever_more_rarely() -> None:
    told = watch(RankTimes(), 200, (0.1, 0.3, 0.2))
    assert [at_s for at_s, _ in told] == [20, 60, 140]
    first = told[0][1]
    assert (first.attempt, first.step, first.num_steps) == (1, 41, 40)
    assert (first.own_ms, first.last) == ((100.0, 300.0, 200.0), (0, 4, 0))
    # Each tells of the time since the one before it.
    assert (told[1][1].num_steps, told[1][1].last) == (80, (0, 8, 0))


def test_each_attempt_is_told_by_itself_of_the_steps_that_it_has_done() -> None:
    """While the second one's ranks restore step 1000, they know of none."""
    times = RankTimes()
    assert watch(times, 19, (0.1, 0.2)) == []
    for second in range(5):
        assert times.look({f"m{rank}": report(rank, 0, {}, attempt=2) for rank in range(2)}, 19 + second) is None
    ((at_s, told),) = watch(times, 25, (0.2, 0.1), from_s=24, attempt=2, first_step=1000)
    assert (at_s, told.attempt, told.num_steps, told.own_ms, told.last) == (44, 2, 40, (200.0, 100.0), (4, 0))


def test_on_gpus_it_is_the_device_that_counts_unless_the_loader_takes_longer() -> None:
    times = RankTimes()
    for second in range(0, 25, 5):
        step = 1 + second
        quick = report(0, step, {"loader": 0.01 * step, "forward": 9.0 * step}, device_s=0.2 * step)
        slow = report(1, step, {"loader": 0.5 * step, "forward": 0.0}, device_s=0.2 * step)
        told = times.look({"a": quick, "b": slow}, second)
    assert told.own_ms == (200.0, 500.0)


def test_nothing_is_told_of_one_rank_alone_or_without_a_step() -> None:
    assert watch(RankTimes(), 50, (0.1,)) == []
    times = RankTimes()
    for second in range(50):
        assert times.look({"a": report(0, 7, {}), "b": report(1, 7, {})}, second) is None
