"""The theorem of steadfast.plan, without a process: every sample of a step is run once, whoever runs it."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadfast.plan import End, EvenSamplesPlan, Microbatch, Plan, even_shares, largest_microbatch, step_of


@st.composite
def plans(draw: st.DrawFn, num_samples: int | None = None) -> Plan:
    """Any batch, any grid, any shares."""
    global_size = draw(st.integers(1, 64))
    microbatch_size = draw(st.integers(1, global_size))
    grid = -(-global_size // microbatch_size)
    cuts = draw(st.lists(st.integers(0, grid), max_size=7))
    shares = tuple(right - left for left, right in pairwise([0, *sorted(cuts), grid]))
    shard = draw(st.sampled_from([each for each in range(1, len(shares) + 1) if len(shares) % each == 0]))
    return Plan(global_size, microbatch_size, shares, shard, num_samples)


def ranks(plan: Plan) -> range:
    return range(len(plan.shares))


def run_by_all(plan: Plan, step: int) -> list[Microbatch]:
    return [each for rank in ranks(plan) for each in plan.microbatches(step, rank)]


def positions(microbatches: list[Microbatch]) -> list[int]:
    """Return the positions that count."""
    return [position for each in microbatches if each.weight for position in range(each.start, each.stop)]


STEPS = st.integers(1, 10**9)


@given(plans(), STEPS)
def test_every_position_of_a_step_is_run_once_and_no_other(plan: Plan, step: int) -> None:
    begin = (step - 1) * plan.global_size
    assert positions(run_by_all(plan, step)) == list(range(begin, begin + plan.global_size))


@given(plans(), STEPS)
def test_the_grid_does_not_depend_on_the_shares(plan: Plan, step: int) -> None:
    """Its microbatches are whole but for the last, and no two of them draw the same dropout."""
    grid = Plan.even(plan.global_size, plan.microbatch_size, 1).microbatches(step, 0)
    assert [each for each in run_by_all(plan, step) if each.weight] == grid
    assert [(each.step, each.index) for each in grid] == [(step, index) for index in range(len(grid))]
    *whole, last = [each.stop - each.start for each in grid]
    assert set(whole) <= {plan.microbatch_size}
    assert 1 <= last <= plan.microbatch_size


@given(plans(), STEPS)
def test_every_rank_runs_its_share_and_pads_only_to_keep_in_step(plan: Plan, step: int) -> None:
    for rank in ranks(plan):
        run = plan.microbatches(step, rank)
        assert len(run) == plan.num_forwards(step, rank) >= 1
        assert [each.weight for each in run] == [1] * plan.shares[rank] + [0] * (len(run) - plan.shares[rank])
    for first in range(0, len(plan.shares), plan.shard_size):
        replica = range(first, first + plan.shard_size)
        most = max(plan.shares[rank] for rank in replica)
        assert {plan.num_forwards(step, rank) for rank in replica} == {max(1, most)}


@st.composite
def courses(draw: st.DrawFn) -> tuple[Plan, list[int]]:
    """A run that was extended some times, each end a number of epochs; and where each of its ends lay, the last too."""
    plan = draw(plans())
    num_train = draw(st.integers(1, 150))
    lengths = sorted(draw(st.sets(st.integers(1, 12), min_size=1, max_size=5)))
    stops = [length * num_train for length in lengths]
    ends: list[End] = []
    for stop in stops[:-1]:
        step = step_of(stop - 1, plan.global_size, ends)
        if replace(plan, num_samples=stop, ends=tuple(ends)).num_samples_in(step) < plan.global_size:
            ends.append(End(step, stop))
    return replace(plan, num_samples=stops[-1], ends=tuple(ends)), stops


@given(courses())
def test_the_steps_of_an_extended_run_are_a_partition_of_the_stream(course: tuple[Plan, list[int]]) -> None:
    plan, stops = course
    ends_at = [step_of(stop - 1, plan.global_size, plan.ends) for stop in stops]
    done: list[int] = []
    for step in range(1, ends_at[-1] + 1):
        run = positions(run_by_all(plan, step))
        assert plan.positions(step) == (len(done), len(done) + len(run))
        assert len(run) == plan.num_samples_in(step) > 0
        assert len(run) == plan.global_size or step in ends_at
        done += run
        if step in ends_at:  # each of the runs that it was before had all of its own samples then, and no other
            assert len(done) in stops
    assert done == list(range(stops[-1]))
    for position in done:
        start, stop = plan.positions(step_of(position, plan.global_size, plan.ends))
        assert start <= position < stop


@given(courses(), st.data())
def test_what_a_run_has_done_stays_when_it_is_extended(course: tuple[Plan, list[int]], data: st.DataObject) -> None:
    """Whichever checkpoint it goes on from: the steps up to an end are those of the run that ended there."""
    plan, stops = course
    stop = data.draw(st.sampled_from(stops))
    before = tuple(end for end in plan.ends if end.position < stop)
    shorter = replace(plan, num_samples=stop, ends=before)
    last = step_of(stop - 1, plan.global_size, before)
    step = data.draw(st.integers(1, last))
    assert run_by_all(plan, step) == run_by_all(shorter, step)


@given(courses())
def test_a_run_counted_in_steps_goes_on_for_ever_behind_its_ends(course: tuple[Plan, list[int]]) -> None:
    plan, _ = course
    endless = replace(plan, num_samples=None)
    for step in range(1, 40):
        assert endless.positions(step)[1] == endless.positions(step + 1)[0]
        short = step in [end.step for end in plan.ends]
        assert short == (endless.num_samples_in(step) < plan.global_size)


@given(st.integers(1, 300).flatmap(plans))
def test_pads_are_as_large_as_a_microbatch_of_their_step(plan: Plan) -> None:
    """And in a short step every rank still runs as often as in a whole one."""
    assert plan.num_samples
    last = -(-plan.num_samples // plan.global_size)
    for rank in ranks(plan):
        run = plan.microbatches(last, rank)
        assert len(run) == plan.num_forwards(last, rank)
        for each in run:
            assert 0 <= each.start < each.stop <= plan.num_samples
            assert each.weight or each.stop - each.start == min(plan.microbatch_size, plan.num_samples_in(last))


@given(plans(), st.integers(1, 50), st.integers(0, 20))
def test_a_stream_is_its_steps_one_after_the_other(plan: Plan, first: int, more: int) -> None:
    """So a run that resumes at a step reads on where the one before it ended."""
    for rank in ranks(plan):
        whole = list(plan.stream(rank, 1, first + more))
        assert whole == [*plan.stream(rank, 1, first - 1), *plan.stream(rank, first, first + more)]
        assert len(whole) == (first + more) * plan.num_forwards(first, rank)


@given(st.integers(0, 1000), st.integers(1, 100))
def test_even_shares_differ_by_one_at_most_and_the_first_take_more(num_microbatches: int, num_workers: int) -> None:
    shares = even_shares(num_microbatches, num_workers)
    assert len(shares) == num_workers
    assert sum(shares) == num_microbatches
    assert max(shares) - min(shares) <= 1
    assert list(shares) == sorted(shares, reverse=True)


@pytest.mark.parametrize(
    ("global_size", "num_workers", "num_fitting", "expected"),
    [
        (48, 1, 99, 48),
        (48, 8, 99, 6),  # each of eight has one
        (48, 8, 5, 4),
        (48, 1, 9, 8),
        (100, 1, 19, 10),  # of a divisor no microbatch is short
        (100, 1, 8, 5),
        (13, 3, 99, 4),  # 1 divides 13, and is too small by far
        (13, 3, 2, 2),
        (13, 3, 1, 1),
        (7, 9, 99, 1),
    ],
)
def test_a_microbatch_is_as_large_as_fits_and_leaves_each_worker_one(
    global_size: int, num_workers: int, num_fitting: int, expected: int
) -> None:
    assert largest_microbatch(global_size, num_workers, num_fitting) == expected


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 500))
def test_a_microbatch_is_more_than_half_of_what_could_be(global_size: int, num_workers: int, num_fitting: int) -> None:
    size = largest_microbatch(global_size, num_workers, num_fitting)
    limit = max(1, min(global_size // num_workers, num_fitting))
    assert limit / 2 < size <= limit
    assert -(-global_size // size) >= min(num_workers, global_size)


def forwards(plan: Plan) -> list[str]:
    """Return a word for each worker: the samples of its forwards in order, those of a pad in brackets."""
    found = []
    for rank in ranks(plan):
        sizes = [(each.stop - each.start, each.weight) for each in plan.microbatches(1, rank)]
        found.append("+".join(f"{size}" if weight else f"({size})" for size, weight in sizes))
    return found


@pytest.mark.parametrize(
    ("global_size", "microbatch_size", "num_workers", "shard", "even_shares", "even_samples"),
    [
        (12, 4, 3, 1, "4 4 4", "4 4 4"),  # nothing is left over
        (11, 4, 3, 1, "4 4 3", "4 4 3"),
        (13, 2, 3, 1, "2+2+2 2+2 2+1", "1+2+2 2+2 2+2"),
        (13, 2, 3, 3, "2+2+2 2+2+(2) 2+1+(2)", "1+2+2 (1)+2+2 (1)+2+2"),
        (4, 2, 3, 1, "2 2 (2)", "2 1 1"),
        (1, 1, 2, 2, "1 (1)", "1 (1)"),
        (24, 8, 2, 1, "8+8 8", "4+8 4+8"),
        (32, 8, 3, 1, "8+8 8 8", "3+8 3+8 2+8"),
        (48, 8, 4, 4, "8+8 8+8 8+(8) 8+(8)", "4+8 4+8 4+8 4+8"),
        (48, 8, 4, 2, "8+8 8+8 8 8", "4+8 4+8 4+8 4+8"),  # two replicas
        (10, 2, 4, 2, "2+2 2+(2) 2 2", "1+2 1+2 2 2"),
        (2, 2, 4, 2, "2 (2) (2) (2)", "1 1 (1) (1)"),
    ],
)
def test_who_runs_what(
    global_size: int, microbatch_size: int, num_workers: int, shard: int, even_shares: str, even_samples: str
) -> None:
    for kind, expected in ((Plan, even_shares), (EvenSamplesPlan, even_samples)):
        assert forwards(kind.even(global_size, microbatch_size, num_workers, shard)) == expected.split()


@given(plans(), st.data())
def test_shares_that_change_on_the_way_leave_no_position_out_and_repeat_none(plan: Plan, data: st.DataObject) -> None:
    changes = data.draw(st.lists(st.tuples(st.integers(1, 4), st.permutations(plan.shares)), max_size=4))
    begins = [sum(gap for gap, _ in changes[: at + 1]) for at in range(len(changes))]
    expected = {begin: tuple(shares) for begin, (_, shares) in zip(begins, changes, strict=True)}
    streams = [plan.stream(rank, 1, 20) for rank in ranks(plan)]
    in_force = plan.shares
    for step in range(1, 21):
        if step in expected:
            plan.change(step, in_force := expected[step])
        assert plan.shares_at(step) == in_force
        run = [next(streams[rank]) for rank in ranks(plan) for _ in range(plan.num_forwards(step, rank))]
        begin = (step - 1) * plan.global_size
        assert sorted(positions(run)) == list(range(begin, begin + plan.global_size))
    assert [next(stream, None) for stream in streams] == [None] * len(streams)


def test_shares_cover_the_grid_and_do_not_change_under_what_has_been_read() -> None:
    for shares in ((3,), (1, 2, 2), (5, -1), (0, 0)):
        with pytest.raises(ValueError, match="do not cover a grid of 4"):
            Plan(global_size=8, microbatch_size=2, shares=shares)
    plan = Plan.even(8, 2, 2)
    for _ in plan.stream(0, 1, 3):
        pass
    with pytest.raises(ValueError, match="step 3 has been read"):
        plan.change(3, (3, 1))
    plan.change(4, (3, 1))
    assert (plan.shares_at(3), plan.shares_at(4)) == ((2, 2), (3, 1))
    with pytest.raises(ValueError, match="do not cover a grid of 4"):
        plan.change(5, (4, 1))


@given(plans(), st.integers(1, 30), st.integers(0, 40), st.frozensets(st.integers(1, 40)))
def test_no_loader_has_read_an_unread_step(plan: Plan, step: int, num_ahead: int, skip: frozenset[int]) -> None:
    """And the one that is farthest ahead has read the step before, or would with its next microbatch."""
    plan = replace(plan, shard_size=1, skip=skip - {step})
    read = []
    for rank in ranks(plan):
        stream = list(plan.stream(rank, 1, 200))
        consumed = sum(each.step <= step for each in stream)
        read.append(stream[consumed + num_ahead - 1].step)
    assert max(read) == plan.first_unread(step, num_ahead) - 1


@st.composite
def even_samples_plans(draw: st.DrawFn) -> EvenSamplesPlan:
    """Any batch, grid, number of ranks and shards, with an end or without."""
    global_size = draw(st.integers(1, 64))
    microbatch_size = draw(st.integers(1, global_size))
    num_ranks = draw(st.integers(1, 12))
    shard = draw(st.sampled_from([each for each in range(1, num_ranks + 1) if num_ranks % each == 0]))
    num_samples = draw(st.none() | st.integers(1, 300))
    return EvenSamplesPlan.even(global_size, microbatch_size, num_ranks, shard, num_samples)


def steps_of(plan: Plan) -> range:
    return range(1, 5 if plan.num_samples is None else plan.last_step + 1)


def num_samples_of(plan: Plan, step: int, rank: int) -> int:
    return len(positions(plan.microbatches(step, rank)))


@given(even_samples_plans())
def test_even_samples_plan_runs_every_sample_once(plan: EvenSamplesPlan) -> None:
    """And gives each microbatch, and each part of one, a number of its own."""
    for step in steps_of(plan):
        assert sorted(positions(run_by_all(plan, step))) == list(range(*plan.positions(step)))
        run = [each for each in run_by_all(plan, step) if each.weight]
        assert sorted(each.index for each in run) == list(range(plan.num_microbatches_in(step)))
        # A loss over the global batch is reported by the rank with the first microbatch, which has the first sample.
        assert [each.start for each in run if each.index == 0] == [plan.positions(step)[0]]


@given(even_samples_plans())
def test_even_samples_plan_takes_no_longer_than_an_even_one(plan: EvenSamplesPlan) -> None:
    """Neither in samples nor in forwards; ranks differ by one sample at most, unless all microbatches are whole."""
    even = Plan.even(plan.global_size, plan.microbatch_size, len(plan.shares), plan.shard_size, plan.num_samples)
    for step in steps_of(plan):
        of_ranks = [num_samples_of(plan, step, rank) for rank in ranks(plan)]
        if any(plan.parts(step)):
            assert max(of_ranks) - min(of_ranks) <= 1
        else:
            sizes = {each.stop - each.start for each in run_by_all(plan, step) if each.weight}
            assert len(sizes) <= 2  # the step's last microbatch may be short
            assert max(of_ranks) - min(of_ranks) < plan.microbatch_size
        assert max(of_ranks) <= max(num_samples_of(even, step, rank) for rank in ranks(plan))
        for rank in ranks(plan):
            run = plan.microbatches(step, rank)
            assert len(run) == plan.num_forwards(step, rank) <= even.num_forwards(step, 0)
            # A rank has one part at most, and runs it first.
            if any(plan.parts(step)):
                assert {each.stop - each.start for each in run[1:]} <= {plan.microbatch_size}
            # Shards of a replica run equally many forwards. A pad takes no longer than what its peers run.
            assert len(run) == len(plan.microbatches(step, rank - rank % plan.shard_size)) >= 1
            assert sum(each.stop - each.start for each in run) <= max(of_ranks)
            pads = [each for each in run if not each.weight]
            assert all(plan.positions(step)[0] <= each.start < each.stop <= plan.positions(step)[1] for each in pads)
