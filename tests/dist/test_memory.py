"""Workers hold the memory that `plan` names, give a model's back, and under fsdp need room for their shards alone."""

import gc
import resource
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import steadfast
from steadfast.config import Config, parse_config
from steadfast.loop.worker_state import WorkerState
from steadfast.plan import even_shares
from steadfast.world.groups import WorldRank
from steadfast.world.runtime import WorkerProcess, form_world
from tests.benchmarks.memory import SIZES, compare, config_of
from tests.examples.script import line, squared_error
from tests.support.gang import Gang, Member, MemberFailed
from tests.support.reference import CPU
from tests.support.small import CONTEXT, VOCABULARY
from tests.support.stepping import train_by_hand

WIDTH = 256
MODEL_BYTES = 4 * WIDTH * WIDTH
TIMES = [4, pytest.param(20, marks=pytest.mark.slow)]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_memory_of_a_worker_is_known_before_the_run(strategy: str) -> None:
    found = compare(config_of(next(iter(SIZES)), strategy, num_workers=2))
    assert found.ratio == pytest.approx(1.0, abs=0.15)


class Counted:
    """A hook that counts, at the begin of each attempt, the models that are alive and the bytes of all parameters."""

    def __init__(self) -> None:
        self.models: list[weakref.ref[nn.Module]] = []
        self.num_alive: list[int] = []
        self.num_bytes: list[int] = []

    def setup(self, run: Any) -> None:
        self.models.append(weakref.ref(run.model))

    def on_start(self, run: Any) -> None:
        self.num_bytes.append(tensor_bytes(nn.Parameter))
        self.num_alive.append(len({id(model) for each in self.models if (model := each())}))


def tensor_bytes(kind: type[torch.Tensor] = torch.Tensor) -> int:
    """Return the bytes behind all tensors of a kind that are alive in this process, and behind their gradients."""
    gc.collect()
    sizes: dict[int, int] = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and isinstance(each, kind):  # some objects pretend to be one
            held: torch.Tensor = each
            for tensor in (held, held.grad if held.is_leaf else None):
                if tensor is not None:
                    storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
                    sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def build_wide() -> nn.Module:
    return nn.Sequential(nn.Linear(4, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 1))


def train(storage: Path, name: str, parallel: dict[str, str], bad_steps: int, hook: Counted) -> None:
    config = steadfast.Config.model_validate(
        {
            "run": {"name": name, "storage": str(storage), "steps": bad_steps + 1, "report": False},
            "batch": {"global_size": 4, "microbatch_size": 4},
            "checkpoint": {"every": "1 steps", "node_memory": False},  # a bad step is found within a save
            "parallel": parallel,
            "faults": {"inject": [{"kind": "nan_at", "step": step + 1, "times": None} for step in range(bad_steps)]},
            "recovery": {"max_skipped_steps": bad_steps},
            "trackers": [],
        }
    )
    steadfast.fit(config, model=build_wide, dataset=line(120), task=squared_error, hooks=[hook])


def check_nothing_is_left(hook: Counted, num_bytes_before: int) -> None:
    """Claim: no model outlives its attempt, and the memory of all attempts is the same."""
    assert tensor_bytes() - num_bytes_before <= 0.02 * MODEL_BYTES
    assert not any(each() for each in hook.models)
    assert max(hook.num_alive) == 1
    print("bytes of parameters at the begin of each attempt:", *hook.num_bytes)
    assert max(hook.num_bytes) - min(hook.num_bytes) <= 0.02 * MODEL_BYTES


PARALLEL = [{"kind": "ddp"}, {"kind": "ddp", "reducer": "torch"}, {"kind": "fsdp"}]


@pytest.mark.parametrize("parallel", PARALLEL, ids=["ddp", "torch", "fsdp"])
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("ends", ["a_rollback", "fit"])
def test_what_ends_gives_back_all_of_its_model(tmp_path: Path, parallel: dict[str, str], times: int, ends: str) -> None:
    hook = Counted()
    before = tensor_bytes()
    if ends == "a_rollback":
        train(tmp_path, "x", parallel, times, hook)
        assert len(hook.num_bytes) == times + 1
    else:
        for number in range(times):
            train(tmp_path, f"run-{number}", parallel, 0, hook)
    check_nothing_is_left(hook, before)


MIB = 2**20
NUM_WORKERS = 4
LAYERS = 20  # 252 million parameters, 1.0 GB in fp32
EMBED_DIM = 1024
LARGE = f"""
run: {{steps: 2, storage: nowhere}}
batch: {{global_size: 4, microbatch_size: 1}}
model: {{kind: gpt, num_heads: 8, embed_dim: {EMBED_DIM}, context_length: {CONTEXT},
         vocab_size: {VOCABULARY}}}
data: {{target: "tests.support.small:Tokens"}}
schedule: {{kind: constant, warmup_steps: 0}}
"""
BLOCK_BYTES = 4 * 12 * EMBED_DIM**2  # its four matrices


def needed_bytes(num_layers: int, num_workers: int) -> float:
    """Parameters, gradients and AdamW's two moments; and one whole block."""
    return 4 * num_layers * BLOCK_BYTES / num_workers + BLOCK_BYTES


def large(kind: str, num_layers: int, *overrides: str) -> Config:
    return parse_config(LARGE, "large.yaml", [f"parallel.kind={kind}", f"model.num_layers={num_layers}", *overrides])


def train_large(member: Member, kind: str, num_layers: int, size: int, room: float, *overrides: str) -> list[int]:
    """The most memory above what the process had before, in bytes, of two attempts; none has more than `room`."""
    tiny = large(kind, 1, "model.embed_dim=8")
    worker = WorkerState(tiny, CPU)
    steps(member, 1, tiny, worker, size)  # imports, threads and buffers
    del worker
    before = psutil.Process().memory_info()
    # Of what may be written; the address space also has what threads' allocators only set aside.
    resource.setrlimit(resource.RLIMIT_DATA, (round(before.data + room), resource.RLIM_INFINITY))
    found = []
    forget_peak()
    config = large(kind, num_layers, *overrides)
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
        for start, again in gang.run(train_large, "fsdp", LAYERS, NUM_WORKERS, 1e12):
            print(f"start {start / MIB:.0f} MiB, again {again / MIB:.0f} MiB, needed {needed / MIB:.0f} MiB")
            assert max(start, again) <= 1.2 * needed


@pytest.mark.parametrize(("num_layers", "embed_dim"), [(12, 640), (40, 352)])
def test_a_step_of_fsdp_holds_no_freed_blocks_when_the_model_is_large(num_layers: int, embed_dim: int) -> None:
    overrides = f"model.embed_dim={embed_dim}", f"model.num_heads={embed_dim // 32}"
    with Gang(NUM_WORKERS) as gang:
        found = gang.run(train_large, "fsdp", num_layers, NUM_WORKERS, 1e12, *overrides)
    print("MiB:", *(round(max(each) / MIB) for each in found))
    assert max(map(max, found)) <= 440 * MIB  # and 360 for two copies of a worker's state are 800


@pytest.mark.slow
def test_a_model_that_one_worker_has_no_room_for_trains_on_four() -> None:
    room = 2 * needed_bytes(5, NUM_WORKERS)
    assert room < needed_bytes(5, 1)
    with Gang(1) as gang, pytest.raises(MemberFailed, match=r"alloc|MemoryError|not enough memory"):
        gang.run(train_large, "ddp", 5, 1, room)
    with Gang(NUM_WORKERS) as gang:
        gang.run(train_large, "fsdp", 5, NUM_WORKERS, room)
