"""What a person sees of a run, and what is kept of it."""

import io
import json
import logging
import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from threading import Event as Flag
from typing import Any, ClassVar

import pytest
import torch

from steadfast.config import parse_config
from steadfast.run.directory import RunDirectory
from steadfast.run.events import (
    AttemptEnded,
    AttemptStarted,
    Checkpoint,
    CheckpointFailed,
    CheckpointQuarantined,
    Event,
    Failure,
    Finished,
    Hang,
    HangOver,
    Log,
    ModelSharded,
    NodeQuarantined,
    NotSaved,
    PartsInEvaluation,
    PrecisionLowered,
    Preemption,
    RankTimes,
    Rollback,
    Scale,
    Shares,
    Silent,
    Snapshot,
    Straggler,
    Validation,
    VariablesKept,
    Waiting,
    WarmupShortened,
    WeightsLeftOut,
)
from steadfast.storage import LocalStore
from steadfast.telemetry.console import Console
from steadfast.telemetry.environment import environment
from steadfast.telemetry.meters import Meters
from steadfast.telemetry.outcome import result
from steadfast.telemetry.past import Past
from steadfast.telemetry.tensorboard import TensorBoardTracker
from steadfast.telemetry.throughput import peak_flops, total_peak_flops
from steadfast.telemetry.trackers import MemoryTracker, Tracker, Trackers, build_trackers
from steadfast.units import compact, duration, node_name, size
from steadfast.world.device import Gpu
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
LINE = (
    "step 1200/9000 13% | loss 2.413 | lr 3.0e-4 | 412 ms | data wait 3% | 39.8k tok/s | mfu 41.2% | 31.2 GiB | "
    "4 workers | eta 53m"
)
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
)
ON_CPU = changed(LOG, mfu=None, world_size=1, step_ms=4.08, unit="samples")


SHARES = Shares(attempt=1, step=60, before=(8, 8), after=(12, 4))


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (LOG, LINE),
        (
            changed(LOG, metrics={"accuracy": 0.912, "length": 12.5}),
            LINE.replace("loss 2.413 |", "loss 2.413 | accuracy 0.9120 | length 12.50 |"),
        ),
        (
            WarmupShortened(attempt=1, before=50, after=20, num_steps=20),
            "schedule.warmup_steps 50 -> 20: the run has 20 steps",
        ),
        (
            WeightsLeftOut(attempt=1, num_missing=2, num_unexpected=1, names=("a", "b", "c")),
            "run.init_from lacks 2 of the model's names and has 1 others: a, b, c",
        ),
        (
            PartsInEvaluation(attempt=1, modules=("backbone", "norms.1")),
            "the model was built with modules in evaluation mode, which stay in it: backbone, norms.1",
        ),
        (ModelSharded(attempt=1, num_units=5, layers={"Block": 4}), "fsdp: 5 units: 4 x Block, the rest"),
        (
            ModelSharded(attempt=1, num_units=1, layers={}),
            "fsdp: 1 unit: the whole model; a method blocks() makes each layer a unit of its own",
        ),
        (
            PrecisionLowered(attempt=1, rank=3, gpu="Tesla T4"),
            "precision is fp32, not bf16: the Tesla T4 of rank 3 has no bf16",
        ),
        (
            VariablesKept(attempt=1, variables=("NCCL_ALGO=Tree", "NCCL_PROTO=LL")),
            "run.deterministic keeps NCCL_ALGO=Tree, NCCL_PROTO=LL of the environment; results may differ between runs",
        ),
        (
            ON_CPU,
            "step 1200/9000 13% | loss 2.413 | lr 3.0e-4 | 4 ms | data wait 3% | 311 samples/s | 31.2 GiB | 1 worker | "
            "eta 53m",
        ),
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
            "snapshots in node memory from step 40 on: 12.3 MiB per worker, 12 ms each",
        ),
        (
            CheckpointFailed(step=40, error="No space left on device", needed_bytes=12_900_000),
            "no checkpoint at step 40 yet, training continues: No space left on device (12.3 MiB are needed)",
        ),
        (
            CheckpointQuarantined(step=40, error="step-00000040/a is missing"),
            "checkpoint at step 40 is damaged and will not be used: step-00000040/a is missing",
        ),
        (
            NotSaved(step=40, error="some of the weights are not finite"),
            "step 40 was not saved: some of the weights are not finite",
        ),
        (STARTED, "attempt 2: 2 workers, step 40 restored from checkpoint | ready in 3.1 s"),
        (
            changed(STARTED, attempt=1, world_size=1, step=0, source="start"),
            "attempt 1: 1 worker, from step 0 | ready in 3.1 s",
        ),
        (
            AttemptEnded(attempt=1, step=43, cause="worker lost"),
            "attempt 1 ended after step 43: worker lost",
        ),
        (AttemptEnded(attempt=1, cause="all workers lost"), "attempt 1 ended: all workers lost"),
        (
            changed(SHARES, microbatch_ms=(10.0, 30.1)),
            "shares (8, 8) -> (12, 4) from step 60: rank 1 is 3.0x slower",
        ),
        (
            changed(SHARES, before=(12, 4), after=(8, 8), microbatch_ms=(10.0, 10.1)),
            "shares (12, 4) -> (8, 8) from step 60: all ranks are equally fast",
        ),
        (changed(SHARES, weights=(3.0, 1.0)), "shares (8, 8) -> (12, 4) from step 60: weights 3, 1"),
        (
            changed(SHARES, after=(8, 8), parallel="fsdp"),
            "shares stay even (8, 8): under fsdp every worker runs the same number",
        ),
        (
            Rollback(attempt=1, steps=(40, 42), cause="loss nan, gradient norm nan at step 42"),
            "rolling back: loss nan, gradient norm nan at step 42; skipped from now on: 40, 42",
        ),
        (
            Failure(member="1f2e3d4c", node="0a1b2c3d4e5f", kind="worker", error="connection closed"),
            "failure (worker) of worker 1f2e3d4c on node 0a1b2c3d: connection closed",
        ),
        (
            Failure(kind="ours", error="waited 60 s for workers"),
            "failure: waited 60 s for workers",
        ),
        (
            Preemption(time_s=5.0, node="0a1b2c3d4e", deadline_s=35.0, members=("a", "b")),
            "node 0a1b2c3d goes in 30 s: 2 workers will leave it",
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
            "rank 0, 1 slow in forward after step 60 for 3.2 s, no rank waits for it; the attempt ends after 600 s; "
            "stacks in x",
        ),
        (
            HangOver(ranks=(1,), phase="forward", step=60, seconds=13.21),
            "rank 1 continued after 13.2 s in forward",
        ),
        (
            Silent(member="1f2e3d4c", seconds=5.12, answers=True, ends_s=60.0),
            "no heartbeat from worker 1f2e3d4c for 5.1 s: its machine answers, its process does not; "
            "declared dead after 60 s",
        ),
        (
            Straggler(member="a", rank=2, phase="loader", lost_s=0.2, share=0.31),
            "rank 2 is slow in loader: the other ranks wait 31% of every step",
        ),
        (Scale(before=(1, 2), after=(2, 4)), "scaling.num_workers [1, 2] -> [2, 4]"),
        (Waiting(workers=1, needed=2), "waiting for workers: 1 of at least 2 have started"),
        (
            NodeQuarantined(time_s=1.0, node="10.0.0.7", attempt=None),
            "node quarantined | node 10.0.0.7",
        ),
    ],
)
def test_one_event_is_one_line(event: Event, line: str) -> None:
    assert event.line() == line


def test_verbose_says_where_the_time_of_a_start_went() -> None:
    spent = " | detected 0.2, formed 0.9, built 1.2, restored 0.6, first_step 0.2"
    assert STARTED.line(verbose=True) == STARTED.line() + spent


def test_numbers_in_words() -> None:
    assert [compact(v) for v in (0, 812, 39_812, 1.2e6)] == ["0", "812", "39.8k", "1.2M"]
    assert [size(v) for v in (0, 512, 2048, 3 * 2**40)] == ["0.0 B", "512.0 B", "2.0 KiB", "3072.0 GiB"]
    spans = [duration(v) for v in (0, 45.2, 221, 3200, 11_520)]
    assert spans == ["0s", "45s", "4m", "53m", "3h 12m"]


def test_only_long_ids_of_nodes_are_shortened() -> None:
    assert node_name("0123456789abcdef" * 3 + "01234567") == "01234567"
    assert node_name("training-node-02.example.com") == "training-node-02.example.com"


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
    "goodput     98.2% | 2 attempts | 1 lost step | stalled 4s",
    "validation  loss 2.310",
    "checkpoint  runs/ddp/checkpoints/step-00002000",
    "curves      tensorboard --logdir runs/ddp/tensorboard",
]


def test_result_tells_what_is_known() -> None:
    assert result(SUMMARY) == RESULT
    unknown = result({**SUMMARY, "tokens": None, "metrics": {}, "last_checkpoint": None, "tensorboard": None})
    assert unknown == ["finished    2000 steps, 96.0k samples in 4m", RESULT[1]]


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


def test_on_a_terminal_a_log_moves_the_bar_and_events_are_lines() -> None:
    seen = on_a_terminal(verbose=False)
    assert "━" in seen
    assert "step 1210/9000 13%" in seen
    assert seen.count("| eta 53m") == 3  # two log events, and once more below the line between them
    assert LINE not in seen
    assert STARTED.line() in seen
    assert seen.rstrip().endswith(RESULT[-1])
    assert LINE in on_a_terminal(verbose=True)


def test_close_gives_the_terminal_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = Console(file=io.StringIO())
    before = sys.stdout
    console.show(LOG)
    assert sys.stdout is not before
    console.close()
    console.close()
    assert sys.stdout is before


def test_meters_give_median_step_and_mean_rates() -> None:
    meters = Meters(flops_per_sample=5e9, peak_flops_total=1e12)
    for seconds in (5.0, 1.0, 1.0, 3.0):
        meters.record(seconds, num_samples=10, units=1000, data_s=0.5)
    first = meters.snapshot(remaining_steps=6)
    rates = {"units_per_s": 400.0, "samples_per_s": 4.0, "mfu": 0.02}
    assert first == {"step_ms": 2000.0, "data_wait": 0.2, "eta_s": 12.0, **rates}
    meters.record(0.5, num_samples=10, units=1000)
    second = meters.snapshot(remaining_steps=0)
    assert second["step_ms"] == 500.0
    assert second["data_wait"] == 0.0


def test_mfu_is_unknown_without_a_peak() -> None:
    meters = Meters(flops_per_sample=5e9)
    meters.record(2.0, num_samples=10, units=10)
    assert meters.snapshot(remaining_steps=3)["mfu"] is None


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("NVIDIA A10", torch.bfloat16, 125),
        ("NVIDIA A10G", torch.bfloat16, 70),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("NVIDIA H100 NVL", torch.float32, 60),
        ("NVIDIA L4", torch.bfloat16, 121),
        ("NVIDIA L40S", torch.float16, 362.05),
        ("NVIDIA L40", torch.bfloat16, 181.05),
        ("NVIDIA A40", torch.bfloat16, 149.7),
        ("NVIDIA H200", torch.bfloat16, 989.4),
        ("NVIDIA H200", torch.float64, None),
        ("NVIDIA H200 NVL", torch.bfloat16, 835.5),
        ("NVIDIA GH200 480GB", torch.bfloat16, 989.4),
        ("NVIDIA B200", torch.bfloat16, 2250),
        ("NVIDIA GB200", torch.bfloat16, 2500),
        ("NVIDIA B300 SXM6 AC", torch.bfloat16, 2250),
        ("Tesla T4", torch.float16, 65),
        ("Tesla T4", torch.float32, 8.1),
        ("Tesla V100-SXM2-16GB", torch.bfloat16, 125),
        ("Tesla V100-PCIE-32GB", torch.float16, 112),
        ("Tesla V100S-PCIE-32GB", torch.float16, 130),
        ("NVIDIA GeForce RTX 3090", torch.bfloat16, 71),
        ("NVIDIA GeForce RTX 3090 Ti", torch.bfloat16, 80),
        ("NVIDIA GeForce RTX 4080 SUPER", torch.bfloat16, 104.4),
        ("NVIDIA GeForce RTX 4090", torch.float32, 82.6),
        ("NVIDIA RTX A6000", torch.bfloat16, 154.8),
        ("NVIDIA RTX 6000 Ada Generation", torch.bfloat16, 364.2),
        # A part of a GPU, and slower ones of nearly the same name.
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", torch.bfloat16, None),
        ("NVIDIA A10-8Q", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 4090 D", torch.bfloat16, None),
        ("NVIDIA GeForce GTX 1080", torch.float32, None),
    ],
)
def test_peak_flops(name: str, dtype: torch.dtype, teraflops: float | None) -> None:
    assert peak_flops(name, dtype) == (teraflops and pytest.approx(teraflops * 1e12))


@pytest.mark.parametrize(
    ("name", "teraflops"), [("NVIDIA A100-SXM4-80GB", 156), ("NVIDIA L4", 60.5), ("Tesla V100-PCIE-32GB", 14)]
)
def test_tf32_has_a_peak_of_its_own_where_a_gpu_has_it(name: str, teraflops: float) -> None:
    assert peak_flops(name, torch.float32, tf32=True) == pytest.approx(teraflops * 1e12)
    assert peak_flops(name, torch.float16, tf32=True) == peak_flops(name, torch.float16)


def test_the_peak_of_a_world_is_the_sum_of_all_its_gpus_and_unknown_if_one_is() -> None:
    a100, l4, unheard_of = Gpu("NVIDIA A100-SXM4-40GB", True), Gpu("NVIDIA L4", True), Gpu("NVIDIA Z1", True)
    assert total_peak_flops((a100, l4, l4), torch.bfloat16, tf32=False) == pytest.approx((312 + 2 * 121) * 1e12)
    assert total_peak_flops((a100, unheard_of), torch.bfloat16, tf32=False) is None
    assert total_peak_flops((), torch.bfloat16, tf32=False) is None


def test_trackers_sort_figures() -> None:
    twin = MemoryTracker()
    trackers = Trackers([twin])
    trackers.record(changed(ON_CPU, metrics={"accuracy": 0.9}))
    trackers.record(Validation(time_s=1.0, step=1200, metrics={"loss": 2.5}))
    trackers.close()
    assert twin.values == {
        "train/loss": {1200: 2.4131},
        "train/lr": {1200: 3e-4},
        "train/grad_norm": {1200: 0.8},
        "train/accuracy": {1200: 0.9},
        "speed/step_ms": {1200: 4.08},
        "speed/data_wait": {1200: 0.031},
        "speed/units_per_s": {1200: 39_812.0},
        "speed/samples_per_s": {1200: 311.0},
        "speed/memory_bytes": {1200: LOG.memory_bytes},
        "speed/world_size": {1200: 1},
        "validation/loss": {1200: 2.5},
    }
    assert twin.closed


def drawn(directory: Path) -> list[tuple[int, float]]:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(directory))
    events.Reload()
    return [(point.step, point.value) for point in events.Scalars("train/loss")]


def test_tensorboard_draws_a_step_done_again_once(tmp_path: Path) -> None:
    for first_step, value in ((1, 1.0), (3, 2.0)):
        trackers = build_trackers(parse_config(""), LocalStore(tmp_path), first_step)
        for step in range(first_step, 5):
            trackers.record(changed(LOG, step=step, total_steps=4, loss=value))
        trackers.close()
    assert drawn(tmp_path / "tensorboard") == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tensorboard")]


def test_tensorboard_has_the_configuration_without_secrets_and_what_interrupted_the_run(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = parse_config("cluster: {env: {TOKEN: hidden}}")
    for first_step, past in ((1, Past()), (8, Past(1, 1, 2, ("failure: its node is gone",)))):
        trackers = build_trackers(config, LocalStore(tmp_path), first_step)
        trackers.begin(config, first_step - 1, past)
        trackers.close()
    found = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    counts = {}
    for tag in ("failures", "resizes", "restarts"):
        counts[tag] = [(each.step, each.value) for each in found.Scalars(f"events/{tag}")]
    assert counts == {"failures": [(0, 0), (7, 1)], "resizes": [(0, 0), (7, 1)], "restarts": [(0, 0), (7, 2)]}
    (told,) = found.Tensors("events/text_summary")
    assert (told.step, told.tensor_proto.string_val[0].decode()) == (7, "    failure: its node is gone")
    written = found.Tensors("configuration/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "global_size: 48" in written
    assert "hidden" not in written


def test_the_past_knows_the_newest_checkpoint_and_where_the_last_attempt_trained(tmp_path: Path) -> None:
    directory = RunDirectory(LocalStore(tmp_path))
    seconds = dict.fromkeys(("detected_s", "formed_s", "built_s", "restored_s", "first_step_s"), 0.0)
    saved = Checkpoint(step=30, path="", seconds=0.0, blocked_s=0.0, bytes=0)
    started = AttemptStarted(step=0, source="start", world_size=2, nodes={"a": (0,), "b": (1,)}, **seconds)
    for event in (saved, started):
        directory.record(event)
    past = Past.read(directory)
    assert (past.committed, past.num_nodes) == (30, 2)


class Misbehaving:
    """A tracker of the user's own without `text` that does `misbehave` where `when` says; `drawn` are its steps."""

    when = ""
    misbehave: Callable[[], object] = staticmethod(lambda: None)
    drawn: ClassVar[list[int]] = []
    closed = Flag()

    def __init__(self, location: str, first_step: int) -> None:
        self._come_to("init")

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._come_to("scalars")
        self.drawn.append(step)

    def close(self) -> None:
        self._come_to("close")
        self.closed.set()

    def _come_to(self, where: str) -> None:
        if self.when == where:
            type(self).misbehave()


def own_tracker(folder: Path, monkeypatch: pytest.MonkeyPatch, when: str, misbehave: Callable[[], object]) -> Trackers:
    for name, value in {"when": when, "misbehave": staticmethod(misbehave), "drawn": [], "closed": Flag()}.items():
        monkeypatch.setattr(Misbehaving, name, value)
    config = parse_config(f"trackers: [{{target: '{__name__}:Misbehaving'}}]")
    return build_trackers(config, LocalStore(folder), 1)


def test_a_tracker_of_the_users_own_needs_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trackers = own_tracker(tmp_path, monkeypatch, "", lambda: None)
    trackers.text(1, "sample", "To be")
    trackers.scalars(2, {})
    trackers.close()
    assert Misbehaving.drawn == [2]
    assert Misbehaving.closed.is_set()
    assert not caplog.records


@pytest.mark.parametrize("error", [ConnectionError("gone"), SystemExit(3), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("when", ["init", "scalars", "close"])
def test_a_tracker_that_raises_is_turned_off_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, when: str, error: BaseException
) -> None:
    def misbehave() -> None:
        raise error

    trackers = own_tracker(tmp_path, monkeypatch, when, misbehave)
    trackers.scalars(1, {})
    trackers.scalars(2, {})
    trackers.close()
    assert Misbehaving.drawn == ([1, 2] if when == "close" else [])
    assert Misbehaving.closed.is_set() == (when == "scalars")
    (told,) = caplog.messages
    assert type(error).__name__ in told


@pytest.mark.parametrize("when", ["init", "scalars", "close"])
def test_a_tracker_that_hangs_holds_neither_a_step_nor_the_end_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    monkeypatch.setattr("steadfast.telemetry.background._LIMIT_S", 0.2)
    release = Flag()
    trackers = own_tracker(tmp_path, monkeypatch, when, lambda: release.wait(60))
    try:
        began_s = time.monotonic()
        trackers.scalars(1, {})
        assert time.monotonic() - began_s < 0.2
        time.sleep(0.3)
        trackers.scalars(2, {})
        trackers.close()
        assert time.monotonic() - began_s < 20
        assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith(__name__))
        assert len(caplog.messages) == 1
        assert "is off until the next attempt" in caplog.text
    finally:
        release.set()


def test_a_failing_tracker_warns_once_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        tracker: Tracker = TensorBoardTracker(LocalStore(tmp_path / "file"), first_step=1)
        tracker.scalars(1, {"train/loss": 1.0})
        tracker.close()
    assert len(caplog.records) == 1
    assert "training goes on" in caplog.text


def test_environment_is_plain_json_and_survives_outside_a_repository(tmp_path: Path) -> None:
    seen = json.loads(json.dumps(environment(tmp_path)))
    assert seen["git"] is None
    assert torch.__version__.startswith(seen["torch"].split("+")[0])
    assert seen["num_cpus"] >= 1


def test_environment_is_known_where_ray_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "ray":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr("steadfast.telemetry.environment.version", version)
    seen = environment(tmp_path)
    assert (seen["torch"], seen["ray"]) == ("1.0", None)


def test_environment_knows_a_changed_working_tree(tmp_path: Path) -> None:
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    tracked = tmp_path / "code.py"
    tracked.write_text("1")
    for command in (("init", "-q"), ("add", "."), ("commit", "-qm", "first")):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "events.jsonl").write_text("")
    clean = environment(tmp_path)["git"]
    tracked.write_text("2")
    assert len(clean) == 40
    assert environment(tmp_path)["git"] == f"{clean}-dirty"


@pytest.mark.parametrize("verbose", [False, True])
def test_details_are_shown_to_those_alone_who_ask_for_them(verbose: bool) -> None:
    file = io.StringIO()
    with closing(Console(verbose, file)) as console:
        console.show(RankTimes(step=4, num_steps=4, own_ms=(1.5, 2.0), last=(0, 1)))
    assert ("each rank itself needs" in file.getvalue()) == verbose


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
