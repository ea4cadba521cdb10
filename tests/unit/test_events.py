"""Events as lines of `events.jsonl`: what is written, what is read back of it, and what is only shown."""

import json
from pathlib import Path
from typing import Any

import pytest

from steadfast.run import events
from steadfast.run.directory import RunDirectory
from steadfast.run.events import Event, parse_event
from tests.support.events import SHOWN, attempt_started, changed, event_lines

TABLE: list[Event] = [
    *(changed(event, attempt=None) for event in SHOWN.values()),
    events.Notice(text="recompute.every compares no gradients of two workers: the run has one worker"),
    events.Notice(event="graph_break", text="a layer is compiled in parts", place="/home/me/model.py:12", reason="no"),
    events.Notice(event="corruption", text="wrong result", step=40, digests={"0": ["00ff"], "1": ["00fe"]}),
    events.RunStarted(launcher="ray"),
    events.RunStarted(launcher="torchrun", again=True),
    events.ShortStep(step=13, position=165),
    events.ForwardsShrunk(step=7, forward_size=4, error="CUDA out of memory."),
    attempt_started(None, nodes={"n": (0, 1)}, gpus=("NVIDIA H200", "NVIDIA L4")),
    events.RankTimes(step=40, num_steps=30, own_ms=(1.5, 2.25), last=(1, 5)),
    events.Output(member="1f2e3d4c", rank=1, lines=("a", "b")),
    events.Restore(step=40, source="checkpoint", lost_steps=3),
    events.AtRisk(step=40, worker=0, workers_of_node=3, workers=3, node=40, everything=40),
    events.Failure(error="waited 60 s for workers: 1 of at least 2 have joined", kind="ours", fatal=True),
    events.Failure(error="bug", kind="exception", member="a", node="b", step=3, budget="3 of 3", traceback="at x"),
    events.ProcessRestarted(process="the coordinator", follows="another one has taken its place"),
    events.RanksDiffer(step=40, tensor="model.head.weight", ranks={"00ff": (0, 2), "00fe": (1,)}),
    events.Finished(summary={"status": "finished", "step": 20, "metrics": {"loss": 2.0}}),
    events.Finished(summary={"status": "stopped", "step": 20, "metrics": {}}, sample="to be"),
]


def named(event: Event) -> str:
    return event.name


def test_the_table_holds_every_kind_under_a_name_of_its_own() -> None:
    kinds = set(Event.__subclasses__())
    assert {type(event) for event in TABLE} == kinds
    assert len({kind.name for kind in kinds}) == len(kinds)
    assert {kind for kind in kinds if not kind.kept} == {events.Log, events.Output}  # which come every few steps


@pytest.mark.parametrize("event", TABLE, ids=named)
@pytest.mark.parametrize(("attempt", "time_s"), [(None, None), (2, 5.25)])
def test_what_is_read_is_what_was_written(event: Event, attempt: int | None, time_s: float | None) -> None:
    written = changed(event, attempt=attempt, time_s=time_s)
    line = json.loads(json.dumps(written.to_line()))
    assert parse_event(line) == written
    # Their fields are whatever a task, a summary or a notice calls them.
    if not isinstance(event, events.Validation | events.Finished | events.Notice):
        assert parse_event({**line, "of_another_release": 1}) == written


@pytest.mark.parametrize("event", TABLE, ids=named)
def test_lines_begin_alike_and_leave_out_what_is_not_known(event: Event) -> None:
    line = event.of_attempt(2).to_line()
    assert list(line)[:3] == ["time_s", "event", "attempt"]
    assert line["event"] == (event.event if isinstance(event, events.Notice) else event.name)
    said = {key: value for key, value in line.items() if key not in ("time_s", "event")}
    assert None not in said.values()
    assert "attempt" not in event.to_line()
    shown = event.of_attempt(2).stamped().line()
    assert shown
    assert "\n" not in shown or isinstance(event, events.Output)  # lines of the user
    assert "None" not in shown.replace("step None", "")  # an attempt that ended before its first step says so


@pytest.mark.parametrize("line", [{}, {"time_s": 1.0}, {"event": []}, {"event": "unknown", "time_s": "yesterday"}])
def test_lines_without_a_name_or_with_a_wrong_time_are_no_events(line: dict[str, Any]) -> None:
    assert parse_event(line) is None


OF_OTHER_RELEASES = {
    "weights left out | num_missing 2 | num_unexpected 1 | names head.weight, head.bias": (
        '"weights_left_out","attempt":2,"num_missing":2,"num_unexpected":1,"names":["head.weight","head.bias"]'
    ),
    "nothing to compare | reason the run has one worker": (
        '"nothing_to_compare","attempt":2,"reason":"the run has one worker"'
    ),
    "nothing frozen": '"nothing_frozen","attempt":2',
    "graph break | place a.py:3 | reason no": '"graph_break","attempt":2,"place":"a.py:3","reason":"no"',
    "said by a later release": '"later","attempt":2,"text":"said by a later release","step":3',
    "of another release | text {'a': 1}": '"of_another_release","attempt":2,"text":{"a":1}',
}


@pytest.mark.parametrize(("text", "line"), OF_OTHER_RELEASES.items())
def test_an_event_of_another_release_is_a_notice_with_its_name_and_fields(text: str, line: str) -> None:
    told = json.loads(f'{{"time_s":5.0,"event":{line}}}')
    assert parse_event(told) == events.Notice(**{**told, "text": text})


def test_a_line_without_a_field_of_this_release_is_no_event() -> None:
    # A notice with a name of its own is read like an event of another release.
    for event in [each for each in TABLE if each.to_line()["event"] == each.name]:
        required = [name for name, field in type(event).model_fields.items() if field.is_required()]
        for name in required:
            line = event.to_line()
            if name in line:  # the metrics of a validation, and a summary, have no field of their own
                del line[name]
                assert parse_event(line) is None


def test_kept_events_are_read_back_in_order_without_unreadable_ones(tmp_path: Path, directory: RunDirectory) -> None:
    kept = [changed(event, time_s=float(number)) for number, event in enumerate(TABLE) if event.kept]
    writer = directory.open_events()
    for event in TABLE:
        if not event.kept:
            writer.write(event)
    for event in kept:
        writer.write(event)
    writer.close()
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"time_s": 1.0, "event": "rollback", "step": 1}\n')
    assert list(directory.all_events()) == kept
    assert len(event_lines(directory)) == len(kept) + 1
    assert directory.events(events.Rollback) == [event for event in kept if isinstance(event, events.Rollback)]


def test_lines_are_exactly_these(tmp_path: Path, directory: RunDirectory) -> None:
    """Scripts may rely on them."""
    for event in (
        events.AttemptEnded(attempt=1, time_s=4.5, cause="worker lost", step=43),
        events.Rollback(attempt=1, time_s=5.0, steps=(40, 42), cause="loss nan"),
        events.Scale(time_s=6.0, before=(1, 2), after=(2, 4)),
        events.Validation(attempt=1, time_s=7.0, step=20, metrics={"loss": 2.0, "accuracy": 0.5}),
        events.Finished(attempt=1, time_s=8.0, summary={"status": "finished", "step": 20, "tokens": None}),
    ):
        directory.record(event)
    assert (tmp_path / "events.jsonl").read_text().splitlines() == [
        '{"time_s":4.5,"event":"attempt_ended","attempt":1,"cause":"worker lost","step":43}',
        '{"time_s":5.0,"event":"rollback","attempt":1,"steps":[40,42],"cause":"loss nan"}',
        '{"time_s":6.0,"event":"scale","before":[1,2],"after":[2,4]}',
        '{"time_s":7.0,"event":"validation","attempt":1,"step":20,"loss":2.0,"accuracy":0.5}',
        '{"time_s":8.0,"event":"finished","attempt":1,"status":"finished","step":20}',
    ]


def test_an_event_keeps_the_time_that_it_has_been_given() -> None:
    event = events.Waiting(workers=1, needed=2)
    stamped = event.stamped()
    assert event.time_s is None
    assert stamped.time_s is not None
    assert stamped.stamped() is stamped
