"""Events as scripts read them, the lines of `events.jsonl`, and as users do."""

import time
from collections.abc import Iterable
from typing import Any, TypeVar

import torch

from steadfast.run import events
from steadfast.run.directory import EVENTS, RunDirectory
from steadfast.run.events import Event
from steadfast.storage.jsonl import read_lines

Kind = TypeVar("Kind", bound=Event)

# The figures of one log step.
LOG = events.Log(
    step=10,
    total_steps=20,
    loss=2.5,
    lr=1e-3,
    grad_norm=0.5,
    unit="tok",
    memory_bytes=1024,
    world_size=2,
    step_ms=12.5,
    units_per_s=100.0,
    samples_per_s=10.0,
    mfu=0.4,
    eta_s=1.5,
    metrics={"accuracy": 0.75},
)


class Published(list[Event]):
    """Events that a runtime on the CPU would publish."""

    device = torch.device("cpu")

    def publish(self, event: Event) -> None:
        self.append(event)


def notices(told: Iterable[Event], name: str) -> list[dict[str, Any]]:
    """Return the lines of the notices with this name, oldest first."""
    lines = [event.to_line() for event in told if isinstance(event, events.Notice)]
    return [line for line in lines if line["event"] == name]


def changed(event: Kind, **fields: Any) -> Kind:
    """Return the event with other values, checked as its own were."""
    return event.model_validate({**dict(event), **fields})


def attempt_started(attempt: int | None = 1, /, **fields: Any) -> events.AttemptStarted:
    """Return the start of a world of two workers, which took no time at all, unless the fields say otherwise."""
    seconds = dict.fromkeys(("detected_s", "formed_s", "built_s", "restored_s", "first_step_s"), 0.0)
    told = {"step": 0, "source": "start", "world_size": 2, **seconds, **fields}
    return events.AttemptStarted(attempt=attempt, **told)


def event_lines(directory: RunDirectory) -> list[dict[str, Any]]:
    """Return every line, oldest first."""
    return list(read_lines(directory.store, EVENTS))


# Lines as a user sees them, each with its event.
LOGGED = events.Log(
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
PHASES = {"detected_s": 0.2, "formed_s": 0.9, "built_s": 1.2, "restored_s": 0.6, "first_step_s": 0.2, "step_s": 0.1}
DDP = {"run": "ddp", "precision": "fp32", "num_parameters": 812_345}
STARTED = attempt_started(2, step=40, source="checkpoint", **PHASES, **DDP)
CONTINUED = changed(STARTED, world_size=1, source="rank 0", step=49, interruption="failure", former_size=2)
RELAID = changed(CONTINUED, world_size=7, former_size=8, layout="1 x 7", former_layout="2 x 4")
DIED = events.Failure(
    member="1f2e3d4c", rank=1, pid=4242, host="gpu7", node="0a1b", kind="worker", error="connection closed"
)
ON_CPU = changed(LOGGED, mfu=None, world_size=1, step_ms=4.08, unit="samples")
SHOWN: dict[str, Event] = {
    LINE: LOGGED,
    LINE.replace("loss 2.413 ", "loss 2.413  accuracy 0.9120  length 12.50 "): changed(
        LOGGED, metrics={"accuracy": 0.912, "length": 12.5}
    ),
    "fsdp gathers the model in 5 units: 4 x Block, the rest of the model": events.ModelSharded(
        attempt=1, num_units=5, layers={"Block": 4}
    ),
    "fsdp gathers the model in 1 unit: the whole model; "
    "a method blocks() makes each layer a unit of its own": events.ModelSharded(attempt=1, num_units=1, layers={}),
    f"{CLOCK} step 1200/9000  loss 2.413  norm 0.800  lr 3.0e-4     4 ms    311 samples/s  1 worker  eta 53m": ON_CPU,
    f"{LINE}  data wait 31%": changed(LOGGED, data_wait=0.31),
    "validation at step 200 | loss 2.000 | accuracy 0.9120": events.Validation(
        time_s=1.0, step=200, metrics={"loss": 2.0, "accuracy": 0.912}
    ),
    "checkpoint at step 40 | 12.3 MiB in 0.4 s | runs/x/step-40": events.Checkpoint(
        step=40, path="runs/x/step-40", seconds=0.42, blocked_s=0.01, bytes=12_900_000
    ),
    "checkpoint at step 40 | 12.3 MiB in 0.4 s | p | older ones cannot be deleted: read-only": events.Checkpoint(
        step=40, path="p", seconds=0.42, blocked_s=0.01, bytes=12_900_000, not_deleted="read-only"
    ),
    "snapshots in node memory from step 40 on: 12.3 MiB per worker; "
    "training waited 12 ms for the copy": events.Snapshot(step=40, stall_s=0.0123, bytes=12_900_000),
    "validation at step 400 | loss 1.900 | best so far": events.Validation(step=400, metrics={"loss": 1.9}, best=True),
    "run ddp: 2 workers on CPU, fp32, 812.3k parameters, step 40 restored from checkpoint | ready in 3.1 s": STARTED,
    "run ddp: 1 worker on NVIDIA H100, bf16, 812.3k parameters, from step 0 | ready in 3.1 s": changed(
        STARTED, attempt=1, world_size=1, step=0, source="start", gpus=("NVIDIA H100",), precision="bf16"
    ),
    "resized from 2 to 1 worker at step 58 in 3.0 s": changed(CONTINUED, interruption="resize", step=58),
    "workers replaced at step 58 in 3.0 s": changed(CONTINUED, interruption="resize", world_size=2, step=58),
    "1 of 2 workers continue from step 49 after 3.0 s": CONTINUED,
    "7 of 8 workers continue from step 49, layout 2 x 4 -> 1 x 7 after 3.0 s": RELAID,
    "2 workers continue from step 49, restored from checkpoint, 9 finished steps to repeat after 3.0 s": changed(
        CONTINUED, world_size=2, source="checkpoint", lost_steps=9
    ),
    "attempt 1 ended after step 43: worker lost": events.AttemptEnded(attempt=1, step=43, cause="worker lost"),
    "attempt 1 ended: all workers lost": events.AttemptEnded(attempt=1, cause="all workers lost"),
    "rolling back: loss nan, gradient norm nan at step 42; steps skipped from now on: 40, 42": events.Rollback(
        attempt=1, steps=(40, 42), cause="loss nan, gradient norm nan at step 42"
    ),
    "worker 1f2e3d4c on node 0a1b2c3d is lost: not heard of for 5 s": events.Failure(
        member="1f2e3d4c", node="0a1b2c3d4e5f", kind="worker", error="not heard of for 5 s"
    ),
    "rank 1 (pid 4242 on gpu7) has died: it was killed or has crashed": DIED,
    "rank 1 (pid 4242 on gpu7) raised ValueError: no": changed(DIED, kind="exception", error="ValueError: no"),
    "rank 1 (pid 4242 on gpu7) was ended: hung in forward for 60.0 s": changed(
        DIED, kind="hang", error="hung in forward for 60.0 s"
    ),
    "rank 1 (pid 4242 on gpu7) is gone with its node": changed(DIED, kind="preemption"),
    "failure: waited 60 s for workers": events.Failure(kind="ours", error="waited 60 s for workers"),
    "node 0a1b2c3d will be taken away in 30 s: 2 workers will leave it": events.Preemption(
        time_s=5.0, node="0a1b2c3d4e", deadline_s=35.0, members=("a", "b")
    ),
    "rank 1 stuck in forward after step 60 for 3.2 s; stacks in runs/x/stacks": events.Hang(
        ranks=(1,), phase="forward", step=60, seconds=3.21, stacks="runs/x/stacks"
    ),
    "rank 1 stuck in forward after step 60 for 3.2 s, the other ranks wait; the attempt ends after 60 s; "
    "stacks in runs/x/stacks": events.Hang(
        ranks=(1,), phase="forward", step=60, seconds=3.21, stacks="runs/x/stacks", ends_s=60.0
    ),
    "ranks 0-1 slow in forward after step 60 for 3.2 s, no rank waits; the attempt ends after 600 s; "
    "stacks in x": events.Hang(
        ranks=(0, 1), phase="forward", step=60, seconds=3.21, stacks="x", guess="slow", ends_s=600.0
    ),
    "rank 1 continued after 13.2 s in forward": events.HangOver(ranks=(1,), phase="forward", step=60, seconds=13.21),
    "rank 2 is slow in loader: the other ranks wait 31% of every step": events.Straggler(
        member="a", rank=2, phase="loader", lost_s=0.2, share=0.31
    ),
    "scaling.num_workers (fewest, most): 1, 2 -> 2, 4": events.Scale(before=(1, 2), after=(2, 4)),
    "training waits for workers: 1 of at least 2 have started": events.Waiting(workers=1, needed=2),
}
