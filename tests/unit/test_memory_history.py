"""What is left of a GPU that was out of memory. There is none here: torch's two functions are replaced."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from steadfast.config import ProfileConfig
from steadfast.run.directory import RunDirectory
from steadfast.storage import LocalStore
from steadfast.telemetry.memory_history import record_memory_history, write_memory_history
from steadfast.world.runtime import World
from tests.support.memory_store import MemoryStore

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
REMEMBER = ProfileConfig(memory_history=1000)
OUT = torch.OutOfMemoryError("CUDA out of memory")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return what the allocator has been asked to remember; its snapshot is the text "allocations"."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: asked.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("allocations"))
    return asked


def world() -> World:
    return World(rank=3, size=4, attempt=2, groups=None)  # type: ignore[arg-type]


def test_the_last_allocations_are_remembered_where_it_is_asked_for(recorded: list[dict[str, Any]]) -> None:
    record_memory_history(ProfileConfig(), CUDA)
    record_memory_history(REMEMBER, CPU)
    assert recorded == []
    record_memory_history(REMEMBER, CUDA)
    assert recorded == [{"max_entries": 1000, "stacks": "python"}]


@pytest.mark.usefixtures("recorded")
def test_a_gpu_that_is_out_of_memory_leaves_its_allocations_and_says_how_to_see_them(tmp_path: Path) -> None:
    told = write_memory_history(REMEMBER, RunDirectory(LocalStore(tmp_path)), world(), CUDA, OUT).to_line()
    assert (told["event"], told["rank"], told["attempt"]) == ("memory_history", 3, 2)
    assert Path(told["path"]) == tmp_path / "profile" / "memory-attempt-2-rank-3.pickle"
    assert Path(told["path"]).read_text() == "allocations"
    assert told["text"].endswith(f"are in {told['path']}: open it on pytorch.org/memory_viz")
    bucket = MemoryStore()
    assert write_memory_history(REMEMBER, RunDirectory(bucket), world(), CUDA, OUT)
    assert bucket.read("profile/memory-attempt-2-rank-3.pickle") == b"allocations"


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("config", "device", "error"),
    [(REMEMBER, CUDA, RuntimeError("other")), (REMEMBER, CPU, OUT), (ProfileConfig(), CUDA, OUT)],
)
def test_otherwise_there_is_nothing_to_write(
    tmp_path: Path, config: ProfileConfig, device: torch.device, error: Exception
) -> None:
    assert write_memory_history(config, RunDirectory(LocalStore(tmp_path)), world(), device, error) is None
    assert not list(tmp_path.iterdir())


def test_a_snapshot_that_fails_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", Mock(side_effect=RuntimeError("CUDA error")))
    assert write_memory_history(REMEMBER, RunDirectory(LocalStore(tmp_path)), world(), CUDA, OUT) is None
