"""A person's view of a run: one line an event, a bar on a terminal, and the result."""

import io
import json
import os
import pty
import re
import subprocess
import sys
import time
from contextlib import closing, suppress
from typing import Any

import pytest

from steadfast.run import events
from steadfast.telemetry.console import Console
from steadfast.telemetry.outcome import result
from tests.support.events import CONTINUED, DIED, LINE, LOGGED, SHOWN, STARTED, changed


@pytest.mark.parametrize(("line", "event"), SHOWN.items())
def test_one_event_is_one_line(line: str, event: events.Event) -> None:
    assert event.line() == line


SUMMARY: dict[str, Any] = {
    "status": "finished",
    "step": 2000,
    "samples": 96_000,
    "tokens": 12_288_000,
    "wall_s": 221.0,
    "goodput": 0.982,
    "attempts": 2,
    "lost_steps": 1,
    "stall_s": 3.9,
    "metrics": {"loss": 2.31},
    "last_checkpoint": "runs/ddp/checkpoints/step-00002000",
    "tensorboard": "runs/ddp/tensorboard",
}
RESULT = [
    "finished    2000 steps, 96.0k samples, 12.3M tokens in 4m",
    "cost        1 lost step | stalled 4s",
    "validation  loss 2.310",
    "checkpoint  runs/ddp/checkpoints/step-00002000",
    "curves      tensorboard --logdir runs/ddp/tensorboard",
]


def test_result_tells_what_is_known() -> None:
    assert result(SUMMARY) == RESULT
    unknown = result({**SUMMARY, "tokens": None, "metrics": {}, "last_checkpoint": None, "tensorboard": None})
    assert unknown == ["finished    2000 steps, 96.0k samples in 4m", RESULT[1]]
    undisturbed = result({**SUMMARY, "attempts": 1, "lost_steps": 0, "stall_s": 0.0})
    assert undisturbed == [RESULT[0], *RESULT[2:]]
    # In a short run the start alone makes the goodput low.
    told = result({**SUMMARY, "status": "stopped", "wall_s": 700.0})
    assert told[1:3] == ["resume      the same command", "goodput     98.2% | 1 lost step | stalled 4s"]


def test_in_a_pipe_every_event_is_a_whole_plain_line() -> None:
    pipe = io.StringIO()
    console = Console(file=pipe)
    console.show(LOGGED)
    console.line("[rank 3] ran out of memory " + "x" * 200)
    console.show(events.Finished(summary=SUMMARY))
    console.finish(SUMMARY)
    assert pipe.getvalue().splitlines() == [LINE, "[rank 3] ran out of memory " + "x" * 200, *RESULT]


def test_console_goes_on_when_the_reader_of_its_pipe_is_gone() -> None:
    script = (
        "import sys\nfrom steadfast.telemetry.console import Console\n"
        "console = Console()\n"
        "for number in range(3): console.line(f'step {number}')\n"
        "print('printed by a library')\n"
        "console.close()\n"
        "sys.stderr.write('went on')\n"
    )
    ours, theirs = os.pipe()
    os.close(ours)
    ended = subprocess.run([sys.executable, "-c", script], stdout=theirs, stderr=subprocess.PIPE, timeout=60)
    os.close(theirs)
    assert (ended.returncode, ended.stderr) == (0, b"went on")


def on_a_terminal(verbose: bool) -> str:
    """What 80 columns of a pseudo-terminal receive: the bar needs a process whose stdout is one."""
    script = (
        "import json, sys\nfrom steadfast.run.events import parse_event\n"
        "from steadfast.telemetry.console import Console\n"
        "console = Console(verbose=sys.argv[1] == 'True')\n"
        "*events, summary = json.loads(sys.argv[2])\n"
        "for event in events: console.show(parse_event(event))\n"
        "console.finish(summary)\n"
    )
    shown = [LOGGED, STARTED, changed(LOGGED, step=1210)]
    lines = json.dumps([*(event.to_line() for event in shown), SUMMARY])
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    subprocess.run([sys.executable, "-c", script, str(verbose), lines], stdout=theirs, env=env, check=True, timeout=60)
    os.close(theirs)
    seen = b""
    with suppress(OSError):  # Linux reports the other side's end so
        while True:
            seen += os.read(ours, 65536)
    os.close(ours)
    return seen.decode()


def test_on_a_terminal_each_log_is_a_line_above_a_short_bar() -> None:
    seen = on_a_terminal(verbose=False)
    bar = re.search("[━╸╺]+", seen)
    assert bar is not None
    assert len(bar[0]) <= 20
    assert f"{LINE}\r\n" in seen
    assert f"{LINE.replace('1200', '1210')}\r\n" in seen
    assert "31.2 GiB  eta 53m" in seen
    assert seen.index(LINE) < seen.index(STARTED.line()) < seen.index(LINE.replace("1200", "1210"))
    assert seen.rstrip().endswith(RESULT[-1])
    assert f"{LINE}  memory 31.2 GiB" in on_a_terminal(verbose=True)


def test_stage_on_a_terminal_counts_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("steadfast.telemetry.console._TICK_S", 0.05)
    file = io.StringIO()
    with closing(Console(file=file)) as console:
        console.stage("starting Ray", since_s=time.time() - 7.0)
        time.sleep(0.2)
        console.line("hello")
    assert "starting Ray 7 s" in file.getvalue()
    assert file.getvalue().endswith("hello\n")


def shown(*told: events.Event, verbose: bool = False) -> list[str]:
    """Return the lines of a pipe after these events."""
    file = io.StringIO()
    with closing(Console(verbose, file)) as console:
        for event in told:
            console.show(event)
    return file.getvalue().splitlines()


def test_a_failure_and_what_follows_are_one_sentence() -> None:
    ended = events.AttemptEnded(attempt=1, step=49, cause="worker lost")
    assert shown(DIED, ended, CONTINUED, LOGGED) == [f"{DIED.line()}; {CONTINUED.line()}", LINE]
    assert shown(DIED, ended, events.Waiting(workers=1, needed=2), CONTINUED) == [
        DIED.line(),
        "training waits for workers: 1 of at least 2 have started",
        CONTINUED.line(),
    ]
    assert shown(DIED) == [DIED.line()]
    assert shown(DIED, CONTINUED, verbose=True) == [DIED.verbose_line(), CONTINUED.verbose_line()]


def test_a_failure_is_shown_soon_when_nothing_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadfast.telemetry.console._HELD_S", 0.05)
    file = io.StringIO()
    with closing(Console(file=file)) as console:
        console.show(DIED)
        time.sleep(0.2)
        assert file.getvalue() == f"{DIED.line()}\n"


def test_output_of_user_code_has_its_rank_and_is_left_to_ray_in_verbose() -> None:
    output = events.Output(member="1f2e3d4c", rank=1, lines=("a", "[b]"))
    assert shown(output) == ["[rank 1] a", "[rank 1] [b]"]
    assert shown(changed(output, rank=None)) == ["[worker 1f2e3d4c] a", "[worker 1f2e3d4c] [b]"]
    assert shown(output, verbose=True) == []


def test_a_validation_comes_after_the_line_of_its_step() -> None:
    validated = events.Validation(step=1200, metrics={"loss": 2.0})
    assert shown(validated, LOGGED) == [LINE, validated.line()]
    later = changed(LOGGED, step=1210)
    assert shown(validated, later) == [validated.line(), later.line()]


def test_close_gives_the_terminal_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = Console(file=io.StringIO())
    before = sys.stdout
    console.show(LOGGED)
    assert sys.stdout is not before
    console.close()
    console.close()
    assert sys.stdout is before


def test_details_are_shown_to_those_alone_who_ask_for_them() -> None:
    for verbose in (False, True):
        told = shown(events.RankTimes(step=4, num_steps=4, own_ms=(1.5, 2.0), last=(0, 1)), verbose=verbose)
        assert ["own time of each rank" in line for line in told] == [True] * verbose
    spent = " | detected 0.2, formed 0.9, built 1.2, restored 0.6, first_step 0.2"
    assert STARTED.verbose_line() == f"attempt 2: {STARTED.line()}{spent}"


def test_what_goes_on_is_said_when_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadfast.telemetry.console._QUIET_S", 0.1)
    file = io.StringIO()
    with closing(Console(file=file)) as console:
        console.stage("starting")
        console.line("hello")
        time.sleep(0.3)
        assert file.getvalue() == "hello\n"
        console.stage("waiting")
        console.stage("training")
        time.sleep(0.3)
        assert file.getvalue() == "hello\ntraining\n"
        console.stage("late", since_s=time.time() - 1.0)
        time.sleep(0.05)
        assert file.getvalue().endswith("late\n")
        console.stage("never")
    time.sleep(0.2)
    assert "never" not in file.getvalue()
