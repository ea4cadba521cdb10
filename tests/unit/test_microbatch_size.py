"""`batch.microbatch_size: auto`, as far as it goes without a world: what fits, and what the run remembers."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from steadfast.config import Config, parse_config
from steadfast.errors import StorageError, UsageError
from steadfast.launch.ray import _narrowed
from steadfast.launch.resume import start_or_resume
from steadfast.loop import microbatch_size as subject
from steadfast.loop.microbatch_size import Room
from steadfast.run.directory import STEPS, RunDirectory
from steadfast.run.events import RunStarted
from steadfast.storage import LocalStore

AUTO = "batch: {global_size: 12, microbatch_size: auto}\nscaling: {num_workers: [1, 2]}"
BEGUN = RunStarted(time_s=0.0, launcher="ray")
MIB = 1 << 20


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(LocalStore(tmp_path / "run"))


def start(directory: RunDirectory, size: object) -> Config:
    config = parse_config(AUTO, "run.yaml", [f"batch.microbatch_size={size}"])
    assert start_or_resume(config, directory, BEGUN, print)
    return config


@pytest.mark.parametrize(
    ("room", "num_fitting"),
    [
        (Room(one=30, two=40, free=1000), 78),  # 20 + 10 n <= 800
        (Room(one=10, two=20, free=1000), 80),
        (Room(one=10, two=30, free=1000), 40),  # nothing is fixed, or less
        (Room(one=30, two=40, free=10), 1),  # which has been seen to fit
        (Room(one=30, two=30, free=1000), math.inf),
        (Room(one=30, two=29, free=1000), math.inf),
    ],
)
def test_what_fits_is_what_two_samples_take_beyond_one(room: Room, num_fitting: float) -> None:
    assert room.num_fitting == num_fitting


class FakeAllocator:
    """A GPU of 1000 bytes, of which others have 100 and a cache of torch's 50; `run` takes 20, and 30 a sample."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held = 200
        self.peak = 999
        for name, value in {
            "memory_allocated": lambda device: self.held,
            "memory_reserved": lambda device: self.held + 50,
            "max_memory_allocated": lambda device: self.peak,
            "reset_peak_memory_stats": lambda device: setattr(self, "peak", self.held),
            "mem_get_info": lambda device: (1000 - 100 - 50 - self.held, 1000),
            "empty_cache": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def run(self, num_samples: int) -> None:
        self.held = 210  # libraries set something aside the first time
        self.peak = max(self.peak, self.held + 20 + 30 * num_samples)


def test_on_a_gpu_its_allocator_says_what_is_taken_and_free(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeAllocator(monkeypatch)
    device = torch.device("cuda", 0)
    assert subject._peaks_on_gpu(gpu.run, device) == (50, 80)
    world: Any = SimpleNamespace()
    assert subject._free_bytes(world, device) == 1000 - 100 - 210


def test_on_a_cpu_tensors_are_counted() -> None:
    weight = torch.ones(MIB, requires_grad=True)

    def run(num_samples: int) -> None:
        (weight * 2).expand(num_samples, MIB).exp().sum().backward()
        weight.grad = None

    one, two = subject._peaks_on_cpu(run)
    # In the backward the exponentials and their gradients; the weight was there before.
    assert one == pytest.approx(2 * 4 * MIB, rel=0.01)
    assert two == pytest.approx(4 * 4 * MIB, rel=0.01)


def test_the_number_of_a_run_is_in_one_place(directory: RunDirectory) -> None:
    config = start(directory, "auto")
    assert directory.batch(config.batch).num_microbatches == 12  # the most that there may be
    directory.write_microbatch_size(4)
    assert directory.batch(config.batch).samples_per_microbatch == 4
    assert directory.batch(config.batch).num_microbatches == 3
    given = start(directory, 2)
    assert directory.batch(given.batch).samples_per_microbatch == 2
    directory.clear()
    assert directory.microbatch_size() is None


def test_a_number_that_cannot_be_read_is_not_chosen_again(directory: RunDirectory, tmp_path: Path) -> None:
    for text in (b"", b"{}", b'{"microbatch_size": 0}', b'{"microbatch_size": "4"}', b"[4]", b"\xff"):
        directory.store.commit("microbatch.json", text)
        with pytest.raises(StorageError, match=r'size .*auto has chosen. Write \{"microbatch_size": N\} there'):
            directory.microbatch_size()
    directory.store.delete("microbatch.json")
    (tmp_path / "run" / "microbatch.json").mkdir()
    with pytest.raises(StorageError, match=r"microbatch.json cannot be read"):
        directory.microbatch_size()
    with pytest.raises(StorageError, match=r"microbatch.json cannot be written"):
        directory.write_microbatch_size(4)


@pytest.mark.parametrize("leaves", ["a checkpoint", "a step"])
def test_a_run_that_had_a_number_keeps_it_when_it_is_given_auto(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, leaves: str
) -> None:
    start(directory, 3)
    start(directory, "auto")
    assert directory.microbatch_size() is None, "it has no step that was cut in threes"
    start(directory, 3)
    if leaves == "a checkpoint":
        monkeypatch.setattr("steadfast.launch.resume.has_checkpoint", lambda directory: True)
    else:
        directory.store.commit(STEPS, b'{"step": 1, "attempt": 1, "num_samples": 12, "time_s": 1.0}\n')
    for _ in range(2):
        start(directory, "auto")
        assert directory.microbatch_size() == 3


def test_workers_that_the_chosen_grid_has_no_work_for_are_refused() -> None:
    config = parse_config(AUTO)
    assert _narrowed((2, 9), config.world_sizes((2, 9), 3), 3) == (2, 3)
    with pytest.raises(UsageError, match=r"at least 4 workers have only 3 microbatches .* because .*auto was resolved"):
        _narrowed((4, 9), config.world_sizes((4, 9), 3), 3)
