"""Who is said to stall, as a table of what workers say of themselves; and what they say, by a clock that is turned."""

import json
import threading
from dataclasses import asdict, replace

import pytest
import torch

from steadfast.liveness.watchdog import Straggler, Watchdog, find_straggler
from steadfast.world.compilation import follow_compilations
from steadfast.world.progress import Progress
from steadfast.world.report import ProgressReport
from tests.support.clock import Clock

WAITING, WORKING = 1, 0  # inside torch, or anywhere else
FORWARD, BACKWARD, DATA, UPDATE = 1, 2, 3, 4


def at(turn: int, left: int, phase: int, inside: int, seconds: float, limit_s: float | None = 3.0) -> ProgressReport:
    name = {FORWARD: "forward", BACKWARD: "backward", DATA: "loader", UPDATE: "update"}.get(phase, "collective")
    return ProgressReport(7, 0, [turn, -left, phase, inside], 41, name, seconds, limit_s, {})


def members(*reports: ProgressReport) -> dict[str, ProgressReport]:
    return {name: replace(each, rank=rank) for rank, (name, each) in enumerate(zip("abc", reports, strict=False))}


def looked_at_twice(*reports: ProgressReport) -> tuple[tuple[int, ...], str] | None:
    """The ranks and phase said to stall, once everybody has been where they are for three seconds more."""
    watchdog = Watchdog()
    assert watchdog.look(members(*reports)) is None
    later = [replace(each, seconds=each.seconds + 3.0) for each in reports]
    hang = watchdog.look(members(*later))
    return (hang.ranks, hang.phase) if hang else None


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([], None),
        # the one in forward makes two wait in backward, with the longer times
        ([at(5, 0, BACKWARD, 1, 3.9), at(5, 0, FORWARD, 0, 4.0), at(5, 0, BACKWARD, 1, 9.0)], ((1,), "forward")),
        ([at(5, 0, BACKWARD, 1, 9.0), at(5, 0, BACKWARD, 1, 9.0), at(5, 1, DATA, 0, 4.0)], ((2,), "loader")),
        # a share of three microbatches, of which one is left, is behind a share of one
        ([at(5, 0, BACKWARD, 1, 9.0), at(5, 1, BACKWARD, 0, 4.0)], ((1,), "backward")),
        # the next step's data are ahead of this one's word
        ([at(5, 1 << 30, DATA, 0, 4.0), at(4, 0, UPDATE, 0, 4.0)], ((1,), "update")),
        ([at(5, 1 << 30, 0, 1, 4.0), at(5, 1 << 30, DATA, 0, 4.0)], ((0,), "collective")),
        # both in forward, one of them in the other's all-gather
        ([at(5, 0, FORWARD, WAITING, 9.0), at(5, 0, FORWARD, WORKING, 4.0)], ((1,), "forward")),
        # nobody can be told from the others
        ([at(5, 0, BACKWARD, 1, 4.0), at(5, 0, BACKWARD, 1, 4.0)], ((0, 1), "backward")),
        # of two who have come equally far, one has just arrived
        ([at(5, 0, FORWARD, 0, 4.0), at(5, 0, FORWARD, 0, -2.0)], None),
        # a leader that writes a checkpoint, as it always does; the others wait in the next step for much longer
        ([at(9, 1 << 30, 0, 0, 30.0, 90.0), at(9, 0, BACKWARD, 1, 29.0)], None),
        # a joiner that compiles for the first time
        ([at(5, 0, BACKWARD, 1, 60.0), at(5, 0, FORWARD, 0, 61.0, 300.0)], None),
        # one has not entered the attempt yet
        ([at(1, 1 << 30, 0, 1, 60.0), replace(at(80, 0, 0, 0, 90.0, None), attempt=6)], None),
        # one has finished the attempt, another not
        ([at(80, 1 << 30, 0, 0, 60.0, None), at(79, 1 << 30, 0, 0, 60.0)], ((1,), "collective")),
        ([at(5, 0, BACKWARD, 1, -1.0), at(5, 0, FORWARD, 0, -0.5)], None),
    ],
)
def test_who_stalls(reports: list[ProgressReport], expected: tuple[tuple[int, ...], str] | None) -> None:
    assert looked_at_twice(*reports) == expected


def test_who_has_not_said_yet_that_a_long_wait_is_over_is_not_taken_for_the_last() -> None:
    watchdog = Watchdog()
    for seconds in (20.0, 21.0, 22.0, 23.0):
        assert watchdog.look(members(at(5, 0, FORWARD, 0, seconds, 90.0), at(5, 0, BACKWARD, 1, seconds))) is None
    assert watchdog.look(members(at(6, 0, BACKWARD, 1, 0.1), at(5, 0, BACKWARD, 1, 23.0))) is None
    assert watchdog.look(members(at(6, 0, BACKWARD, 1, 0.9), at(5, 0, BACKWARD, 1, 24.0))) is None
    assert watchdog.look(members(at(6, 0, BACKWARD, 1, 0.9), at(6, 0, FORWARD, 0, 0.1))) is None


def test_who_waits_is_named_too() -> None:
    watchdog = Watchdog()
    for seconds in (0.0, 5.0):
        world = members(*(at(5, left, BACKWARD, 1, seconds) for left in (0, 1, 0)))
        hang = watchdog.look(world)
    assert (hang.members, hang.waiting, hang.seconds, hang.step) == (("b",), ("a", "c"), 5.0, 41)


def progress() -> tuple[Progress, Clock]:
    clock = Clock()
    found = Progress(clock=clock)
    found.begin(attempt=7, rank=2)
    return found, clock


def run_phase(found: Progress, clock: Clock, phase: str, *durations: float) -> None:
    for seconds in durations:
        found.mark(phase)
        clock.now_s += seconds
    found.mark("something else")


@pytest.mark.parametrize(
    ("phase", "durations", "limit_s"),
    [
        ("forward", [], 300.0),
        ("forward", [0.1], 3.0),
        ("forward", [60.0, 0.1], 300.0),  # compiled; another shape may have to be compiled too
        ("forward", [60.0, *[0.1] * 200], 3.0),
        ("collective", [0.7, 0.9], 4.5),
        ("checkpoint", [0.1], 10.0),
        ("checkpoint", [4.0], 20.0),
        ("forward", [60.0, 60.0, 60.0, 60.0, 60.0, 60.0, *[0.1] * 512], 3.0),  # long ago
    ],
)
def test_limits_follow_from_what_a_phase_has_taken(phase: str, durations: list[float], limit_s: float) -> None:
    found, clock = progress()
    run_phase(found, clock, phase, *durations)
    found.enter(phase)
    assert found.report().limit_s == pytest.approx(limit_s)


def test_a_phase_that_an_attempt_broke_off_was_not_completed() -> None:
    found, clock = progress()
    run_phase(found, clock, "backward", 0.1)
    found.mark("backward")
    clock.now_s += 500.0
    found.leave()
    assert found.report().limit_s is None
    found.begin(attempt=8, rank=0)
    found.mark("backward")
    assert found.report().limit_s == 3.0


def test_what_earlier_attempts_took_is_remembered_and_what_they_did_is_not() -> None:
    found, clock = progress()
    run_phase(found, clock, "loader", 2.0)
    found.enter("collective", step=3)
    found.leave()
    found.begin(attempt=8, rank=1)
    assert (found.report().step, found.report().spent_s) == (0, {}), "nothing has been restored yet"
    found.resume(5)
    found.mark("loader")
    assert (found.report().step, found.report().phase, found.report().limit_s) == (5, "loader", 10.0)


def test_seconds_of_a_phase_begin_anew_with_each_mark_and_a_stop_of_the_whole_process_hardly_counts() -> None:
    found, clock = progress()
    for _ in range(2):
        found.mark("forward")
        for _ in range(3):
            clock.now_s += 1.0
            said = found.report()
        assert said.seconds == pytest.approx(3.0)
    clock.now_s += 60.0
    assert found.report().seconds == pytest.approx(5.0)


def test_a_step_goes_forward_only() -> None:
    """Whatever the share, each mark is beyond the one before it, and each word is where all ranks are alike."""
    words = []
    for num_microbatches in (1, 3):
        found, _ = progress()
        found.enter("restore")
        positions = [found.report().position]
        batches = found.fetching(iter("abc" * 9))
        for step in (1, 2):
            for left, _ in zip(reversed(range(num_microbatches)), batches, strict=False):
                positions.append(found.report().position)
                found.mark("forward", left)
                positions.append(found.report().position)
                found.mark("backward")
                positions.append(found.report().position)
            found.mark("update")
            positions.append(found.report().position)
            found.enter("collective", step)
            positions.append(found.report().position)
            words.append(found.report().position)
        assert positions == sorted(positions)
        assert len({tuple(each) for each in positions}) == len(positions)
    assert words[:2] == words[2:]


class Device:
    """A device whose clock is turned by hand: a mark passes when the test says so."""

    on_device = True

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.done = False
        self.failed = False

    def mark(self) -> float:
        return self._clock.now_s

    def passed(self, mark: float) -> bool:
        if self.failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.done

    def between_s(self, first: float, second: float) -> float:
        return second - first


def progress_on_device() -> tuple[Progress, Clock, Device]:
    found, clock = progress()
    device = Device(clock)
    found.begin(attempt=7, rank=2, device_clock=device)  # type: ignore[arg-type]
    found.enter("restore")
    return found, clock, device


def test_of_hosts_that_wait_alike_the_one_whose_device_still_computes_is_behind() -> None:
    positions = {}
    for name in ("done", "computing", "failed"):
        found, _, device = progress_on_device()
        found.mark("forward", 0)
        found.mark("backward")
        found.mark("gradients")
        device.done = name == "done"
        device.failed = name == "failed"
        positions[name] = found.report().position
        found.mark("update")
        assert positions[name] < found.report().position
    assert positions["computing"] == positions["failed"] < positions["done"]


def test_the_time_of_a_step_on_a_device_runs_from_its_first_forward_to_its_last_backward() -> None:
    found, clock, _ = progress_on_device()
    for _ in range(2):
        for left in (1, 0):
            found.mark("loader")
            clock.now_s += 10.0 * left
            found.mark("forward", left)
            clock.now_s += 1.0
            found.mark("backward")
            clock.now_s += 2.0
        found.mark("gradients")
        clock.now_s += 50.0
        found.mark("update")
        found.enter("collective")
    assert found.report().device_s == pytest.approx(2 * 2 * 3.0)


def test_a_compilation_is_a_phase_of_its_own() -> None:
    """It neither counts as the phase that it interrupts, nor moves the rank back, nor soon counts as a hang."""
    found, clock = progress()
    run_phase(found, clock, "forward", *[0.1] * 20)
    found.mark("forward", 0)
    before = found.report()
    clock.now_s += 0.2
    found.compiling()
    clock.now_s += 100.0
    during = found.report()
    assert (during.phase, during.limit_s, during.position) == ("compile", 300.0, before.position)
    found.compiled()
    clock.now_s += 0.3
    after = found.report()
    assert (after.phase, after.limit_s, after.position) == ("forward", 3.0, before.position)
    found.mark("backward")
    assert found.report().spent_s == {**found.report().spent_s, "compile": 100.0, "forward": 2.5}
    found.mark("forward")
    assert found.report().limit_s == 3.0
    found.leave()
    found.compiling()
    found.compiled()
    assert found.report().phase == "idle"


def test_torch_tells_when_it_compiles() -> None:
    found, _ = progress()
    follow_compilations(found)
    seen = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        seen.append(found.report().phase)
        return graph

    found.mark("forward")
    compiled = torch.compile(lambda x: x + 1, backend=backend)
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    assert seen == ["compile"]
    assert found.report().phase == "forward"


def test_a_report_travels_as_json() -> None:
    found, clock = progress()
    run_phase(found, clock, "loader", 0.25)
    found.enter("collective", step=41)
    said = found.report()
    line = json.dumps(asdict(said))
    assert ProgressReport(**json.loads(line)) == said
    assert len(line) < 400
    assert (said.attempt, said.rank, said.step, said.phase, said.spent_s["loader"]) == (7, 2, 41, "collective", 0.25)


def test_the_training_thread_comes_first_among_the_stacks() -> None:
    found, _ = progress()
    stuck, told = threading.Event(), threading.Event()

    def training_thread_is_stuck_here() -> None:
        found.begin(attempt=1, rank=0)
        told.set()
        stuck.wait()

    thread = threading.Thread(target=training_thread_is_stuck_here, name="zzz")
    thread.start()
    told.wait()
    stacks = found.stacks()
    stuck.set()
    thread.join()
    assert stacks.startswith("zzz (most recent call first)")
    assert "training_thread_is_stuck_here" in stacks
    assert "test_the_training_thread" not in stacks  # the one that asks


def worked(step: int, data_s: float, forward_s: float, rest_s: float, device_s: float = 0.0) -> ProgressReport:
    spent = {"loader": data_s, "forward": forward_s, "backward": rest_s}
    return ProgressReport(7, 0, [0, 0, 0, 0], step, "collective", 0.0, 3.0, spent, device_s)


@pytest.mark.parametrize(
    ("data_s", "forward_s", "device_s", "expected"),
    [
        ([1.0, 1.0, 1.0], [20.0, 20.0, 20.0], [0.0, 0.0, 0.0], None),
        ([1.0, 1.0, 1.0], [20.0, 21.0, 20.0], [0.0, 0.0, 0.0], None),  # 2 % of a step
        ([1.0, 1.0, 1.0], [20.0, 20.0, 40.0], [0.0, 0.0, 0.0], Straggler("c", 2, "forward", 0.2, 0.4)),
        ([1.0, 11.0, 1.0], [20.0, 20.0, 20.0], [0.0, 0.0, 0.0], Straggler("b", 1, "loader", 0.1, 0.2)),
        # A host launches a forward in a moment, however long its device takes.
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [30.0, 50.0, 30.0], Straggler("b", 1, "device", 0.2, 0.4)),
    ],
)
def test_who_makes_the_others_wait(
    data_s: list[float], forward_s: list[float], device_s: list[float], expected: Straggler | None
) -> None:
    """A hundred steps of half a second."""
    before = members(*[worked(50, 3.0, 3.0, 3.0)] * 3)
    spent = zip(data_s, forward_s, device_s, strict=True)
    after = [worked(150, 3.0 + data, 3.0 + forward, 53.0 - data - forward, device) for data, forward, device in spent]
    assert find_straggler(before, members(*after)) == expected


def test_nobody_straggles_who_is_alone_or_has_done_nothing_or_is_in_another_attempt() -> None:
    one, other = worked(50, 1.0, 1.0, 1.0), worked(60, 9.0, 9.0, 1.0)
    assert find_straggler({"a": one}, {"a": other}) is None
    assert find_straggler(members(one, one), members(one, one)) is None
    assert find_straggler(members(one, one), members(replace(other, attempt=8), other)) is None
    assert find_straggler({}, members(one, other)) is None
