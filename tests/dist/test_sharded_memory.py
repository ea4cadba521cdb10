"""Under fsdp a worker needs memory for its shards and what it gathers at a time, at the start and in each re-form."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import psutil
import pytest
import torch

from app.components.schedule import build_schedule
from app.components.worker_state import WorkerState
from app.config import Config, parse_config
from app.parallel import arrange, build_parallel
from app.plan import Amendments
from app.step import Stepper
from app.world.runtime import World, form_world
from tests.dist.gang import Gang, Member, MemberFailed
from tests.dist.reference import CPU

MIB = 2**20
M_MMAP_THRESHOLD = -3  # in malloc.h
NUM_WORKERS = 4
# 252 million parameters, 1.0 GB in fp32.
LAYERS, WIDTH, VOCABULARY, CONTEXT = 20, 1024, 256, 8
LARGE = f"""
run: {{steps: 2, storage: nowhere}}
batch: {{global_size: 4, microbatch_size: 1}}
model: {{kind: gpt, num_layers: {LAYERS}, num_heads: 8, embed_dim: {WIDTH}, context_length: {CONTEXT},
         vocab_size: {VOCABULARY}}}
data: {{target: "tests.dist.test_sharded_memory:Few"}}
schedule: {{kind: constant, warmup_steps: 0}}
"""
BLOCK_BYTES = 4 * 12 * WIDTH**2  # its four matrices
MODEL_BYTES = LAYERS * BLOCK_BYTES
# Parameters, gradients and AdamW's two moments; and one whole block.
NEEDED_BYTES = 4 * MODEL_BYTES / NUM_WORKERS + BLOCK_BYTES


class Few:
    """A few random tokens."""

    units_per_sample = CONTEXT

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(VOCABULARY, (CONTEXT + 1,), generator=torch.Generator().manual_seed(index))
        return tokens[:-1], tokens[1:]


def config_of(kind: str) -> Config:
    return parse_config(LARGE, "large.yaml", [f"parallel.kind={kind}"])


def train(member: Member, kind: str, first_attempt: int, num_attempts: int, size: int, room: int) -> list[int]:
    """The most memory above what the process had before, in bytes, of each attempt; none has more than `room`."""
    # What is freed goes back to the system at once, so that the most that was held can be seen.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)
    config = config_of(kind)
    tiny = parse_config(LARGE, "tiny.yaml", [f"parallel.kind={kind}", "model.num_layers=1", "model.embed_dim=8"])
    worker = WorkerState(tiny, CPU)
    steps(member, first_attempt, tiny, worker, size)  # imports, threads and buffers
    del worker
    before = psutil.Process().memory_info()
    resource.setrlimit(resource.RLIMIT_AS, (before.vms + room, resource.RLIM_INFINITY))
    found = []
    forget_peak()
    worker = WorkerState(config, CPU)
    for attempt in range(first_attempt + 1, first_attempt + 1 + num_attempts):
        steps(member, attempt, config, worker, size)
        found.append(peak_bytes() - before.rss)
        forget_peak()
    return found


def steps(member: Member, attempt: int, config: Config, worker: WorkerState, size: int) -> None:
    world = arrange(form_world(member.store, member.number, size, attempt, CPU), config.parallel)
    try:
        take(world, config, worker)
    finally:
        world.groups.destroy()


def take(world: World, config: Config, worker: WorkerState) -> None:
    parallel = build_parallel(config.parallel, world, worker.precision)
    model, _ = worker.prepare(Amendments(), parallel)
    worker.load_initial()
    plan = worker.plan(world.size, parallel)
    schedule = build_schedule(config.schedule, worker.num_steps)
    parts = model, worker.optimizer, worker.task, parallel, worker.precision, schedule, plan, world
    stepper = Stepper(*parts, units_per_sample=CONTEXT, counts_vary=False, max_grad_norm=1.0, seed=1)
    batches = worker.loader.steps(plan.stream(world.rank, 1, worker.num_steps))
    for step in range(1, worker.num_steps + 1):
        stepper.step(step, batches)


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@pytest.mark.slow
def test_a_worker_holds_its_shards_and_one_block_at_the_start_and_through_a_reform() -> None:
    with Gang(NUM_WORKERS) as gang:
        for start, again in gang.run(train, "fsdp", 1, 2, NUM_WORKERS, 10**12):
            print(f"start {start / MIB:.0f} MiB, again {again / MIB:.0f} MiB, needed {NEEDED_BYTES / MIB:.0f} MiB")
            assert max(start, again) <= 1.2 * NEEDED_BYTES


@pytest.mark.slow
def test_a_model_that_one_worker_has_no_room_for_trains_on_four() -> None:
    room = round(2 * NEEDED_BYTES)
    assert room < 4 * MODEL_BYTES
    with Gang(1) as gang, pytest.raises(MemberFailed, match=r"alloc|MemoryError|not enough memory"):
        gang.run(train, "ddp", 1, 1, 1, room)
    with Gang(NUM_WORKERS) as gang:
        gang.run(train, "fsdp", 1, 2, NUM_WORKERS, room)
