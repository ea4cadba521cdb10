"""A person's view of a run: one line an event, a bar on a terminal, and the result."""

import io
import json
import os
import pty
import re
import subprocess
import sys
import time
from contextlib import closing
from typing import Any

import pytest

from steadfast.run.events import (
    AttemptEnded,
    AttemptStarted,
    Checkpoint,
    CheckpointFailed,
    CheckpointQuarantined,
    Event,
    Failure,
    Finished,
    GraphBreak,
    Hang,
    HangOver,
    LeftOver,
    Log,
    ModelSharded,
    NodeQuarantined,
    NotSaved,
    Output,
    Preemption,
    RankTimes,
    Rollback,
    Scale,
    Shares,
    Silent,
    Snapshot,
    Straggler,
    Validation,
    Waiting,
)
from steadfast.telemetry.console import Console
from steadfast.telemetry.outcome import result
from tests.support.events import changed

LOG = Log(
    time_s=1.0,
    step=1200,
    total_steps=9000,
    loss=2.4131,
    lr=3e-4,
    grad_norm=0.8,
    step_ms=412.3,
    data_wait=0.031,
    units_per_s=39_812.0,
    samples_per_s=311.0,
    mfu=0.4118,
    memory_bytes=int(31.2 * 2**30),
    world_size=4,
    eta_s=3200.0,
    unit="tok",
)
CLOCK = time.strftime("%H:%M:%S", time.localtime(1.0))
LINE = f"{CLOCK} step 1200/9000  loss 2.413  norm 0.800  lr 3.0e-4   412 ms  39.8k tok/s  mfu 41.2%  4 workers  eta 53m"
STARTED = AttemptStarted(
    attempt=2,
    world_size=2,
    step=40,
    source="checkpoint",
    detected_s=0.2,
    formed_s=0.9,
    built_s=1.2,
    restored_s=0.6,
    first_step_s=0.2,
    step_s=0.1,
    run="ddp",
    precision="fp32",
    num_parameters=812_345,
)
CONTINUED = changed(STARTED, world_size=1, source="rank 0", step=49, interruption="failure", former_size=2)
RELAID = changed(CONTINUED, world_size=7, former_size=8, layout="1 x 7", former_layout="2 x 4")
DIED = Failure(member="1f2e3d4c", rank=1, pid=4242, host="gpu7", node="0a1b", kind="worker", error="connection closed")
ON_CPU = changed(LOG, mfu=None, world_size=1, step_ms=4.08, unit="samples")


SHARES = Shares(attempt=1, step=60, before=(8, 8), after=(12, 4))


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (LOG, LINE),
        (
            changed(LOG, metrics={"accuracy": 0.912, "length": 12.5}),
            LINE.replace("loss 2.413 ", "loss 2.413  accuracy 0.9120  length 12.50 "),
        ),
        (
            ModelSharded(attempt=1, num_units=5, layers={"Block": 4}),
            "fsdp gathers the model in 5 units: 4 x Block, the rest of the model",
        ),
        (
            ModelSharded(attempt=1, num_units=1, layers={}),
            "fsdp gathers the model in 1 unit: the whole model; a method blocks() makes each layer a unit of its own",
        ),
        (
            ON_CPU,
            f"{CLOCK} step 1200/9000  loss 2.413  norm 0.800  lr 3.0e-4     4 ms    311 samples/s  1 worker  eta 53m",
        ),
        (changed(LOG, data_wait=0.31), f"{LINE}  data wait 31%"),
        (
            Validation(time_s=1.0, step=200, metrics={"loss": 2.0, "accuracy": 0.912}),
            "validation at step 200 | loss 2.000 | accuracy 0.9120",
        ),
        (
            Checkpoint(step=40, path="runs/x/step-40", seconds=0.42, blocked_s=0.01, bytes=12_900_000),
            "checkpoint at step 40 | 12.3 MiB in 0.4 s | runs/x/step-40",
        ),
        (
            Checkpoint(step=40, path="p", seconds=0.42, blocked_s=0.01, bytes=12_900_000, not_deleted="read-only"),
            "checkpoint at step 40 | 12.3 MiB in 0.4 s | p | older ones cannot be deleted: read-only",
        ),
        (
            Snapshot(step=40, stall_s=0.0123, bytes=12_900_000),
            "snapshots in node memory from step 40 on: 12.3 MiB per worker; training waited 12 ms for the copy",
        ),
        (
            CheckpointFailed(step=40, error="No space left on device", needed_bytes=12_900_000),
            "checkpoint at step 40 is not written; training continues, and a retry or the next checkpoint follows: "
            "No space left on device (12.3 MiB are needed)",
        ),
        (
            CheckpointQuarantined(step=40, error="step-00000040/a is missing"),
            "checkpoint at step 40 is damaged and will not be used: step-00000040/a is missing",
        ),
        (
            NotSaved(step=40, error="some of the weights are not finite"),
            "the run ends without a checkpoint of step 40: some of the weights are not finite",
        ),
        (
            Validation(step=400, metrics={"loss": 1.9}, best=True),
            "validation at step 400 | loss 1.900 | best so far",
        ),
        (
            STARTED,
            "run ddp: 2 workers on CPU, fp32, 812.3k parameters, step 40 restored from checkpoint | ready in 3.1 s",
        ),
        (
            changed(STARTED, attempt=1, world_size=1, step=0, source="start", gpus=("NVIDIA H100",), precision="bf16"),
            "run ddp: 1 worker on NVIDIA H100, bf16, 812.3k parameters, from step 0 | ready in 3.1 s",
        ),
        (
            changed(CONTINUED, interruption="resize", step=58),
            "resized from 2 to 1 worker at step 58 in 3.0 s",
        ),
        (
            changed(CONTINUED, interruption="resize", world_size=2, step=58),
            "workers replaced at step 58 in 3.0 s",
        ),
        (CONTINUED, "1 of 2 workers continue from step 49 after 3.0 s"),
        (RELAID, "7 of 8 workers continue from step 49, layout 2 x 4 -> 1 x 7 after 3.0 s"),
        (
            changed(CONTINUED, world_size=2, source="checkpoint", lost_steps=9),
            "2 workers continue from step 49, restored from checkpoint, 9 finished steps to repeat after 3.0 s",
        ),
        (
            AttemptEnded(attempt=1, step=43, cause="worker lost"),
            "attempt 1 ended after step 43: worker lost",
        ),
        (AttemptEnded(attempt=1, cause="all workers lost"), "attempt 1 ended: all workers lost"),
        (
            changed(SHARES, microbatch_ms=(10.0, 30.1)),
            "shares (8, 8) -> (12, 4) microbatches from step 60: rank 1 is 3.0x slower than the fastest rank",
        ),
        (
            changed(SHARES, before=(12, 4), after=(8, 8), microbatch_ms=(10.0, 10.1)),
            "shares (12, 4) -> (8, 8) microbatches from step 60: all ranks are equally fast",
        ),
        (
            changed(SHARES, weights=(3.0, 1.0)),
            "shares (8, 8) -> (12, 4) microbatches from step 60: batch.balance gives weights 3, 1",
        ),
        (
            changed(SHARES, after=(8, 8), parallel="fsdp"),
            "shares stay (8, 8) microbatches: under fsdp every worker runs the same number of microbatches",
        ),
        (
            Rollback(attempt=1, steps=(40, 42), cause="loss nan, gradient norm nan at step 42"),
            "rolling back: loss nan, gradient norm nan at step 42; steps skipped from now on: 40, 42",
        ),
        (
            Failure(member="1f2e3d4c", node="0a1b2c3d4e5f", kind="worker", error="not heard of for 5 s"),
            "worker 1f2e3d4c on node 0a1b2c3d is lost: not heard of for 5 s",
        ),
        (DIED, "rank 1 (pid 4242 on gpu7) has died: it was killed or has crashed"),
        (changed(DIED, kind="exception", error="ValueError: no"), "rank 1 (pid 4242 on gpu7) raised ValueError: no"),
        (
            changed(DIED, kind="hang", error="hung in forward for 60.0 s"),
            "rank 1 (pid 4242 on gpu7) was ended: hung in forward for 60.0 s",
        ),
        (changed(DIED, kind="preemption"), "rank 1 (pid 4242 on gpu7) is gone with its node"),
        (
            Failure(kind="ours", error="waited 60 s for workers"),
            "failure: waited 60 s for workers",
        ),
        (
            Preemption(time_s=5.0, node="0a1b2c3d4e", deadline_s=35.0, members=("a", "b")),
            "node 0a1b2c3d will be taken away in 30 s: 2 workers will leave it",
        ),
        (
            Hang(ranks=(1,), phase="forward", step=60, seconds=3.21, stacks="runs/x/stacks"),
            "rank 1 stuck in forward after step 60 for 3.2 s; stacks in runs/x/stacks",
        ),
        (
            Hang(ranks=(1,), phase="forward", step=60, seconds=3.21, stacks="runs/x/stacks", ends_s=60.0),
            "rank 1 stuck in forward after step 60 for 3.2 s, the other ranks wait; the attempt ends after 60 s; "
            "stacks in runs/x/stacks",
        ),
        (
            Hang(ranks=(0, 1), phase="forward", step=60, seconds=3.21, stacks="x", guess="slow", ends_s=600.0),
            "ranks 0-1 slow in forward after step 60 for 3.2 s, no rank waits; the attempt ends after 600 s; "
            "stacks in x",
        ),
        (
            HangOver(ranks=(1,), phase="forward", step=60, seconds=13.21),
            "rank 1 continued after 13.2 s in forward",
        ),
        (
            Silent(member="1f2e3d4c", seconds=5.12, answers=True, ends_s=60.0),
            "no heartbeat from worker 1f2e3d4c for 5.1 s: its machine answers, its process does not; "
            "the worker is declared dead after 60 s",
        ),
        (
            Straggler(member="a", rank=2, phase="loader", lost_s=0.2, share=0.31),
            "rank 2 is slow in loader: the other ranks wait 31% of every step",
        ),
        (GraphBreak(place="", reason="no"), "a layer is compiled in parts, which is slower: no"),
        (LeftOver(workers=1, unit=2), "1 worker must wait: a replica needs 2 workers"),
        (Scale(before=(1, 2), after=(2, 4)), "scaling.num_workers (fewest, most): 1, 2 -> 2, 4"),
        (Waiting(workers=1, needed=2), "training waits for workers: 1 of at least 2 have started"),
        (
            NodeQuarantined(time_s=1.0, node="10.0.0.7", attempt=None),
            "node 10.0.0.7 gets no new workers for a while: its workers died early or computed wrongly",
        ),
    ],
)
def test_one_event_is_one_line(event: Event, line: str) -> None:
    assert event.line() == line


def test_verbose_says_where_the_time_of_a_start_went() -> None:
    spent = " | detected 0.2, formed 0.9, built 1.2, restored 0.6, first_step 0.2"
    assert STARTED.verbose_line() == f"attempt 2: {STARTED.line()}{spent}"


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


def test_result_of_an_undisturbed_run_has_no_goodput() -> None:
    told = result({**SUMMARY, "attempts": 1, "lost_steps": 0, "stall_s": 0.0})
    assert told == [RESULT[0], *RESULT[2:]]


def test_a_long_run_tells_its_goodput_and_a_stopped_run_how_it_goes_on() -> None:
    """In a short run the start alone makes the goodput low."""
    told = result({**SUMMARY, "status": "stopped", "wall_s": 700.0})
    assert told[1:3] == ["resume      the same command", "goodput     98.2% | 1 lost step | stalled 4s"]


def test_in_a_pipe_every_event_is_a_whole_plain_line() -> None:
    pipe = io.StringIO()
    console = Console(file=pipe)
    console.show(LOG)
    console.line("[rank 3] ran out of memory " + "x" * 200)
    console.show(Finished(summary=SUMMARY))
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
    shown = [LOG, STARTED, changed(LOG, step=1210)]
    events = json.dumps([*(event.to_line() for event in shown), SUMMARY])
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    subprocess.run([sys.executable, "-c", script, str(verbose), events], stdout=theirs, env=env, check=True, timeout=60)
    os.close(theirs)
    seen = b""
    while chunk := read(ours):
        seen += chunk
    os.close(ours)
    return seen.decode()


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux reports the other side's end so
        return b""


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


def shown(*events: Event, verbose: bool = False) -> list[str]:
    """Return the lines of a pipe after these events."""
    file = io.StringIO()
    with closing(Console(verbose, file)) as console:
        for event in events:
            console.show(event)
    return file.getvalue().splitlines()


def test_a_failure_and_what_follows_are_one_sentence() -> None:
    ended = AttemptEnded(attempt=1, step=49, cause="worker lost")
    assert shown(DIED, ended, CONTINUED, LOG) == [f"{DIED.line()}; {CONTINUED.line()}", LINE]
    assert shown(DIED, ended, Waiting(workers=1, needed=2), CONTINUED) == [
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
    output = Output(member="1f2e3d4c", rank=1, lines=("a", "[b]"))
    assert shown(output) == ["[rank 1] a", "[rank 1] [b]"]
    assert shown(changed(output, rank=None)) == ["[worker 1f2e3d4c] a", "[worker 1f2e3d4c] [b]"]
    assert shown(output, verbose=True) == []


def test_a_validation_comes_after_the_line_of_its_step() -> None:
    validated = Validation(step=1200, metrics={"loss": 2.0})
    assert shown(validated, LOG) == [LINE, validated.line()]
    later = changed(LOG, step=1210)
    assert shown(validated, later) == [validated.line(), later.line()]


def test_close_gives_the_terminal_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = Console(file=io.StringIO())
    before = sys.stdout
    console.show(LOG)
    assert sys.stdout is not before
    console.close()
    console.close()
    assert sys.stdout is before


@pytest.mark.parametrize("verbose", [False, True])
def test_details_are_shown_to_those_alone_who_ask_for_them(verbose: bool) -> None:
    file = io.StringIO()
    with closing(Console(verbose, file)) as console:
        console.show(RankTimes(step=4, num_steps=4, own_ms=(1.5, 2.0), last=(0, 1)))
    assert ("own time of each rank" in file.getvalue()) == verbose


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
