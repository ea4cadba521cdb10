"""Under fsdp a worker needs memory for its shards and what it gathers at a time, at the start and in each re-form."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import psutil
import pytest
import torch

from steadfast.config import Config, parse_config
from steadfast.loop.worker_state import WorkerState
from steadfast.plan import even_shares
from steadfast.world.groups import WorldRank
from steadfast.world.runtime import WorkerProcess, form_world
from tests.support.gang import Gang, Member, MemberFailed
from tests.support.reference import CPU
from tests.support.stepping import train_by_hand

MIB = 2**20
M_MMAP_THRESHOLD = -3  # in malloc.h
NUM_WORKERS = 4
LAYERS = 20  # 252 million parameters, 1.0 GB in fp32
WIDTH, VOCABULARY, CONTEXT = 1024, 256, 8
LARGE = f"""
run: {{steps: 2, storage: nowhere}}
batch: {{global_size: 4, microbatch_size: 1}}
model: {{kind: gpt, num_heads: 8, embed_dim: {WIDTH}, context_length: {CONTEXT},
         vocab_size: {VOCABULARY}}}
data: {{target: "tests.dist.test_sharded_memory:Few"}}
schedule: {{kind: constant, warmup_steps: 0}}
"""
BLOCK_BYTES = 4 * 12 * WIDTH**2  # its four matrices


def needed_bytes(num_layers: int, num_workers: int) -> float:
    """Parameters, gradients and AdamW's two moments; and one whole block."""
    return 4 * num_layers * BLOCK_BYTES / num_workers + BLOCK_BYTES


class Few:
    """A few random tokens."""

    units_per_sample = CONTEXT

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(VOCABULARY, (CONTEXT + 1,), generator=torch.Generator().manual_seed(index))
        return tokens[:-1], tokens[1:]


def config_of(kind: str, num_layers: int, *overrides: str) -> Config:
    return parse_config(LARGE, "large.yaml", [f"parallel.kind={kind}", f"model.num_layers={num_layers}", *overrides])


def train(member: Member, kind: str, num_layers: int, size: int, room: float) -> list[int]:
    """The most memory above what the process had before, in bytes, of two attempts; none has more than `room`."""
    # What is freed goes back to the system at once, so that the most that was held can be seen.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)
    tiny = config_of(kind, 1, "model.embed_dim=8")
    worker = WorkerState(tiny, CPU)
    steps(member, 1, tiny, worker, size)  # imports, threads and buffers
    del worker
    before = psutil.Process().memory_info()
    # Of what may be written; the address space also has what threads' allocators only set aside.
    resource.setrlimit(resource.RLIMIT_DATA, (round(before.data + room), resource.RLIM_INFINITY))
    found = []
    forget_peak()
    config = config_of(kind, num_layers)
    worker = WorkerState(config, CPU)
    for attempt in (2, 3):
        steps(member, attempt, config, worker, size)
        found.append(peak_bytes() - before.rss)
        forget_peak()
    return found


def steps(member: Member, attempt: int, config: Config, worker: WorkerState, size: int) -> None:
    world = form_world(member.store, WorldRank(member.number, size, attempt), WorkerProcess(CPU))
    try:
        train_by_hand(world, config, even_shares(config.batch.num_microbatches, size), worker)
    finally:
        world.groups.destroy()


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@pytest.mark.slow
def test_a_worker_holds_its_shards_and_one_block_at_the_start_and_through_a_reform() -> None:
    needed = needed_bytes(LAYERS, NUM_WORKERS)
    with Gang(NUM_WORKERS) as gang:
        for start, again in gang.run(train, "fsdp", LAYERS, NUM_WORKERS, 1e12):
            print(f"start {start / MIB:.0f} MiB, again {again / MIB:.0f} MiB, needed {needed / MIB:.0f} MiB")
            assert max(start, again) <= 1.2 * needed


@pytest.mark.slow
def test_a_model_that_one_worker_has_no_room_for_trains_on_four() -> None:
    room = 2 * needed_bytes(5, NUM_WORKERS)
    assert room < needed_bytes(5, 1)
    with Gang(1) as gang, pytest.raises(MemberFailed, match=r"alloc|MemoryError|not enough memory"):
        gang.run(train, "ddp", 5, 1, room)
    with Gang(NUM_WORKERS) as gang:
        gang.run(train, "fsdp", 5, NUM_WORKERS, room)
