"""The report of a run: what it shows, that it asks for nothing else, and that it ends no run."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from steadfast.analysis.report import figures
from steadfast.analysis.report.course import Course, Curve, Trace
from steadfast.analysis.report.write import reported, write_report
from steadfast.config import parse_config
from steadfast.errors import TrainingError, UsageError
from steadfast.run import events
from steadfast.run.directory import METRICS, REPORT, STEPS, RunDirectory
from steadfast.storage import LocalStore
from tests.support.events import attempt_started
from tests.support.run_directories import write_lines

HOSTILE = "</script><img src=http://evil/x onerror=alert(1)>"
START_S = 1_800_000_000.0


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """A run of six steps: a worker fails after the fourth, the other does two again, and then the run grows."""
    directory = RunDirectory(LocalStore(tmp_path))
    directory.record(events.RunStarted(time_s=START_S, launcher="ray"))
    write(directory, attempt=1, steps=range(1, 5), world_size=2, began_s=START_S + 10)
    nodes = {"alpha": (1,), HOSTILE: (0,)}
    directory.record(started(1, 2, START_S + 11, nodes=nodes, gpus=(HOSTILE, "NVIDIA H200")))
    for own_ms, num_steps, last in (((10.0, 30.0), 1, (0, 4)), ((10.0, 10.0), 3, (3, 1))):
        told = events.RankTimes(attempt=1, step=4, num_steps=num_steps, own_ms=own_ms, last=last)
        directory.record(told.model_copy(update={"time_s": START_S + 14}))
    failure = events.Failure(time_s=START_S + 15.5, kind="worker", member="w1", error=HOSTILE)
    directory.record(failure)
    directory.record(events.AttemptEnded(time_s=START_S + 16, attempt=1, cause="worker lost"))
    directory.record(events.Restore(time_s=START_S + 19, attempt=2, step=2, source="snapshot", lost_steps=2))
    write(directory, attempt=2, steps=range(3, 6), world_size=1, began_s=START_S + 20)
    directory.record(started(2, 1, START_S + 21, step=2, source="snapshot", detected_s=3.5))
    directory.record(events.Straggler(time_s=START_S + 22, member=HOSTILE, rank=1, phase="loader", lost_s=1, share=0.4))
    directory.record(events.AttemptEnded(time_s=START_S + 23, attempt=2, cause="resized", step=5))
    write(directory, attempt=3, steps=range(6, 7), world_size=2, began_s=START_S + 24)
    directory.record(started(3, 2, START_S + 25, step=5, source="rank 0"))
    directory.record(events.Validation(time_s=START_S + 26, step=6, metrics={"loss": 1.5}))
    directory.store.commit("config.yaml", f"run: {{name: '{HOSTILE}'}}".encode())
    directory.write_environment({"git": HOSTILE})
    return directory


def test_what_an_interruption_cost(directory: RunDirectory) -> None:
    course = Course.read(directory)
    failure, growth = course.interruptions
    assert (failure.kind, failure.step, failure.workers, failure.source) == ("failure", 2, (2, 1), "snapshot")
    assert failure.cause == f"loss of worker w1: {HOSTILE}"
    # Two seconds until it was known, four until the next step began, and two steps of a second.
    assert (failure.detected_s, failure.back_s, failure.lost_steps, failure.redone_s) == (2, 4, 2, 2)
    assert failure.lost_s == 8
    assert (growth.kind, growth.workers, growth.cause, growth.lost_s) == ("resize", (1, 2), "a worker joined", 1)
    # What the time of all ranks is sorted into says the same.
    spent = course.ledger.accounts[1].seconds
    assert spent["detection"] == failure.detected_s
    assert spent["re-forming"] + spent["restore"] == failure.back_s


def test_ranks_are_drawn_by_node_with_what_a_step_cost_each_beside_the_others(directory: RunDirectory) -> None:
    one, other = Course.read(directory).ranks()
    assert (one.attempt, one.rank, one.node, one.gpu, one.own_ms, one.last) == (1, 0, HOSTILE, HOSTILE, 10.0, 3 / 8)
    # A third as often as it was told of three times as many steps.
    assert (other.node, other.gpu, other.own_ms, other.last) == ("alpha", "NVIDIA H200", 15.0, 5 / 8)
    assert other.of_median == pytest.approx(15 / 12.5)
    drawing = figures.worlds(Course.read(directory))
    assert [*drawing.legend] == ["alpha", HOSTILE, "workers"]
    drawn = drawing.plot.renderers[0].data_source.data
    assert list(drawn["top"]) == [1, 2, 1, 2]
    assert list(drawn["left"]) == [0.0, 0.0, 10.0, 14.0]  # from the first step on, without the start


def test_an_interruption_that_is_not_over_is_on_the_page(directory: RunDirectory) -> None:
    directory.record(events.Failure(time_s=START_S + 27, kind="worker", member="w2", error="gone"))
    directory.record(events.AttemptEnded(time_s=START_S + 28, attempt=3, cause="worker lost"))
    page = Path(write_report(directory)).read_text()
    assert "loss of worker w2: gone" in page
    assert "not back yet" in page


def test_the_page_shows_it_and_asks_for_nothing(directory: RunDirectory) -> None:
    path = Path(write_report(directory))
    page = path.read_text()
    assert path.stat().st_size < 3_000_000
    assert "alert(1)" in page
    assert "<img" not in page
    assert page.count("</script>") == 3  # Bokeh, the plots, and what draws them
    around = page.partition("<script>")[0] + page.partition("</script>")[2]
    assert re.findall(r"<[^>]*\b(?:src|href)=", around) == []
    assert 'content="default-src' in page
    for title in ("at step", "why", "steps lost", "time lost"):
        assert page.count(f'data-head="{title}"') == 2  # a narrow screen shows it beside the value
    assert "<p>No time: data wait, validation, snapshot, checkpoint wait, " in page
    assert "measuring held-out samples" not in page
    for told in ("8.0 s", "2 → 1", "snapshot", "40%", "waiting for workers", "NVIDIA H200", "62%"):
        assert told in page


def test_command_that_ended_before_its_first_step_has_a_bar(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = RunDirectory(LocalStore(tmp_path))
    for command in range(2):
        directory.record(events.RunStarted(time_s=START_S + 10 * command, launcher="ray"))
        directory.record(events.Failure(time_s=START_S + 10 * command + 5, error="no data", step=0))
    directory.record(events.RunStarted(time_s=START_S + 20, launcher="ray"))
    write(directory, attempt=3, steps=range(1, 3), world_size=1, began_s=START_S + 30)
    directory.record(started(3, 1, START_S + 31))
    drawing = figures.time_of_ranks(Course.read(directory))
    assert [*drawing.plot.xaxis.major_label_overrides.values()] == ["0", "0", "3"]
    assert {*drawing.plot.renderers[0].data_source.data["place"]} == {0, 1, 2}
    write_report(directory)
    assert caplog.messages == []  # of Bokeh, about what it cannot draw


def test_of_a_long_run_few_points_are_kept_with_the_extremes_and_the_means() -> None:
    curve = Curve(most_points=100)
    for step in range(1, 10_001):
        curve.add(step, {"loss": float(step)})
    assert 50 <= len(curve.steps) <= 100
    assert curve.steps[-1] > 9_800
    curve.add(5_000, {"loss": 0.0})  # done again
    assert all(step <= 5_000 for step in curve.steps)
    values = [1.0, 3.0] * 5_000
    values[4_321] = 50.0
    trace = Trace.of(range(1, 10_001), values, most_points=100)
    assert len(trace.steps) == 100
    assert trace.steps == sorted(trace.steps)
    assert trace.values[trace.steps.index(4_322)] == 50.0
    assert {round(mean) for mean in trace.means} == {2}
    assert Trace.of([1, 2], [3.0, 4.0]) == Trace([1, 2], [3.0, 4.0], [3.0, 4.0])


def test_losses_are_those_of_every_step_that_counts(directory: RunDirectory) -> None:
    lines: list[dict[str, Any]] = [{"step": 3, "attempt": 9, "loss": None}, {"step": 4, "attempt": 9, "loss": math.nan}]
    write_lines(directory, [*lines, {"step": 5, "attempt": 9, "loss": 0.25}])
    losses = Course.read(directory).losses()
    assert (losses.steps, losses.values) == ([1, 2, 5, 6], [2.0, 2.0, 0.25, 2.0])


def test_report_shows_metrics_rate_and_gradient_norm(directory: RunDirectory) -> None:
    figures_of_step = {"lr": 1e-5, "grad_norm": 2.5, "metrics": {HOSTILE: 0.5, "odd": "text"}}
    write_lines(directory, [{"step": 6, "attempt": 3, "loss": 2.0, **figures_of_step}], METRICS)
    directory.record(events.Validation(time_s=START_S + 26, step=6, metrics={"loss": 1.5, "top1": 0.75}))
    course = Course.read(directory)
    assert course.metrics() == [HOSTILE, "top1"]
    assert [*figures.metric(course, HOSTILE).legend] == ["training", "failure", "resize"]
    assert [*figures.metric(course, "top1").legend] == ["validation", "failure", "resize"]
    page = Path(write_report(directory)).read_text()
    for told in ("<h3>top1</h3>", "<b>0.7500</b><span>validation top1</span>", "<b>1.500</b>", "Gradient norm"):
        assert told in page
    assert "<img" not in page


@pytest.mark.parametrize(("num_steps", "shown"), [(4, "start-up 10 s · training 4 s"), (400, "goodput 97.6%")])
def test_short_run_shows_seconds_in_place_of_goodput(tmp_path: Path, num_steps: int, shown: str) -> None:
    directory = RunDirectory(LocalStore(tmp_path))
    directory.record(events.RunStarted(time_s=START_S, launcher="ray"))
    write(directory, attempt=1, steps=range(1, num_steps + 1), world_size=1, began_s=START_S + 10)
    page = Path(write_report(directory)).read_text()
    assert f"<p>{shown} · not interrupted</p>" in page
    assert ("goodput" in page.partition("</header>")[0]) == (num_steps > 300)
    assert [*figures.losses(Course.read(directory)).legend] == ["training"]
    assert "validation loss" not in page
    assert "<h3>Learning rate</h3><p>No figures yet.</p>" in page


def test_a_report_that_fails_is_a_warning(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    config = parse_config("model: {kind: gpt}\ndata: {kind: text}").run
    with reported(config, directory, said.append):
        pass
    assert said == [f"report      {directory / REPORT}"]
    monkeypatch.setattr(Course, "read", lambda _: 1 / 0)
    with pytest.raises(TrainingError, match="as it was"), reported(config, directory, said.append):
        raise TrainingError("as it was")
    assert said[1:] == ["warning: no report.html: ZeroDivisionError: division by zero"]
    off = config.model_copy(update={"report": False})
    with reported(off, directory, said.append):
        pass
    assert len(said) == 2


def test_run_without_a_step_has_empty_figures_and_one_that_has_not_begun_no_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = RunDirectory(LocalStore(tmp_path))
    with pytest.raises(UsageError, match="nothing to report"):
        write_report(directory)
    directory.record(events.RunStarted(time_s=START_S, launcher="ray"))
    write_report(directory)
    assert (tmp_path / REPORT).exists()
    assert not caplog.records  # bokeh tells of columns that it misses


def started(attempt: int, world_size: int, time_s: float, **fields: Any) -> events.AttemptStarted:
    seconds = {"formed_s": 1.0, "built_s": 1.0, "restored_s": 0.5, "first_step_s": 1.0, "step_s": 1.0}
    return attempt_started(attempt, world_size=world_size, time_s=time_s, **{**seconds, **fields})


def write(directory: RunDirectory, attempt: int, steps: range, world_size: int, began_s: float) -> None:
    """Write steps of a second each."""
    lines = []
    for place, step in enumerate(steps, 1):
        line = {"step": step, "attempt": attempt, "world_size": world_size, "num_samples": 4}
        lines.append({**line, "step_s": 1.0, "time_s": began_s + place, "loss": 2.0, "step_ms": 1000.0})
    for name in (STEPS, METRICS):
        write_lines(directory, lines, name)
