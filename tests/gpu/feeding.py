"""Whether the device waits for data."""

import time
from itertools import pairwise
from typing import Any

import torch

from steadfast.config import parse_config
from steadfast.loop.worker_state import WorkerState
from steadfast.parallel.precision import build_precision
from steadfast.plan import Plan
from tests.gpu.scene import Scene

_MICROBATCHES, _PER_STEP = 200, 10
_CONFIG = """
run:       {steps: 100000}
batch:     {global_size: 320, microbatch_size: 32}
data:      {target: "tests.gpu.speed:Noise", args: {context: 1024, vocabulary: 50304}, validation_fraction: 0.0}
model:     {target: "tests.gpu.subjects:Net", args: {width: 64}}
precision: {kind: fp32}
trackers:  []
"""


def loader(scene: Scene) -> None:
    """Fetch 200 microbatches of 32 k tokens, in place and by two loader processes, each beside some 10 ms of work.

    Asserts that the device is idle for less than 1 % of the time between the first and the last of them.
    Figures: the idle share for both; in a rehearsal the share of the host's time that went into waiting for data.
    """
    for num_workers in (0, 2):
        share = _idle_share(scene, num_workers)
        scene.figure(**{f"idle_share_{num_workers}_processes": share})
        scene.check_on_gpu(share < 0.01, f"with {num_workers} loader processes the device is idle for {share:.1%}")


def _idle_share(scene: Scene, num_workers: int) -> float:
    config = parse_config(_CONFIG, "loader", [f"data.num_workers={num_workers}"])
    device = torch.device("cuda", 0) if scene.on_gpu else torch.device("cpu")
    assert build_precision(config.precision, device).device == device
    worker = WorkerState(config, device)
    plan = Plan.even(config.batch.global_size, config.batch.samples_per_microbatch, 1)
    batches = worker.loader.steps(plan.stream(0, 1, worker.num_steps))
    matrix = torch.randn((4096, 4096) if scene.on_gpu else (256, 256), device=device)
    marks: list[tuple[Any, Any]] = []
    for _ in range(_MICROBATCHES if scene.on_gpu else _PER_STEP):
        fetched = next(batches)
        began = _mark(scene)
        _work(matrix, fetched.batch)
        marks.append((began, _mark(scene)))
    if scene.on_gpu:
        torch.cuda.synchronize()
    return _share_between(scene, marks)


def _work(matrix: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> None:
    # Each product takes 3 ms of an H100 in fp32.
    for _ in range(4):
        matrix @ matrix
    batch[0].sum()


def _mark(scene: Scene) -> Any:
    if not scene.on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _share_between(scene: Scene, marks: list[tuple[Any, Any]]) -> float:
    """Return the share of the whole time that lies between the end of one piece of work and the start of the next."""
    idle = 0.0
    for (_, ended), (began, _) in pairwise(marks):
        idle += ended.elapsed_time(began) if scene.on_gpu else began - ended
    first, last = marks[0][0], marks[-1][1]
    return float(idle / (first.elapsed_time(last) if scene.on_gpu else last - first))
