"""How batches reach the device, with a fake in place of CUDA's streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from steadfast.data import copies as subject
from steadfast.data.batches import convert

BATCH: Any = {"x": torch.ones(2, 3), "y": (torch.arange(2), "text")}


class FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self._log = log

    def wait_stream(self, other: FakeStream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    current = [FakeStream("computing", lines)]

    @contextmanager
    def stream(chosen: FakeStream) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    def to(self: Tensor, device: torch.device, dtype: torch.dtype | None, non_blocking: bool) -> Tensor:
        assert non_blocking
        lines.append(f"{tuple(self.shape)} to {device} as {dtype} on {current[-1].name}")
        return self.clone()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("copying", lines))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, used: lines.append(f"{tuple(self.shape)} on {used.name}"))
    return lines


def test_a_gpu_copies_beside_its_work_and_memory_stays_until_that_is_done(log: list[str]) -> None:
    copies = subject.StreamCopies(torch.device("cuda", 1), torch.bfloat16)
    copied: Any = copies(BATCH)
    assert log == [
        "(2, 3) to cuda:1 as torch.bfloat16 on copying",
        "(2,) to cuda:1 as None on copying",
        "computing waits for copying",
        "(2, 3) on computing",
        "(2,) on computing",
    ]
    assert copied["x"] is not BATCH["x"]
    assert copied["y"][1] == "text"


def test_a_cpu_converts_floating_point_tensors_only() -> None:
    converted: Any = convert(BATCH, torch.float64)
    assert converted["x"].dtype == torch.float64
    assert converted["y"][0] is BATCH["y"][0]
