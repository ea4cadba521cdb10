"""What a rank computes with, as it is told."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from steadfast.world import hardware
from steadfast.world.hardware import Hardware, kind_of, read_hardware

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_a_processor_is_named_with_all_that_the_order_of_a_sum_follows_from() -> None:
    before = torch.get_num_threads()
    kinds = set()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            kinds.add(kind_of(CPU))
    finally:
        torch.set_num_threads(before)
    assert len(kinds) == 2
    found = read_hardware(CPU)
    assert (found.uuid, found.serial) == ("", "")
    assert str(found) == f"host {found.host}, {found.device}"
    assert kind_of(CPU).startswith(found.device)


@pytest.mark.parametrize(
    ("answer", "serial", "said"),
    [
        ("1650222027113\n", "1650222027113", "host h, NVIDIA A100, GPU-1-2, serial number 1650222027113"),
        ("[N/A]\n", "", "host h, NVIDIA A100, GPU-1-2"),
        (FileNotFoundError(), "", "host h, NVIDIA A100, GPU-1-2"),
        (subprocess.TimeoutExpired("nvidia-smi", 10), "", "host h, NVIDIA A100, GPU-1-2"),
    ],
)
def test_a_gpu_is_named_by_its_uuid_and_the_serial_number_that_its_driver_tells(
    answer: str | Exception, serial: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        asked.append(command)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(stdout=answer)

    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(uuid="1-2"))
    monkeypatch.setattr("socket.gethostname", lambda: "h")
    monkeypatch.setattr("subprocess.run", run)
    found = read_hardware(CUDA)
    assert found == Hardware("h", "NVIDIA A100", "GPU-1-2", serial)
    assert str(found) == said
    assert "--id=GPU-1-2" in asked[0]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release\nGCC version:\n", "550.54.15"),
        (None, "unknown"),
    ],
)
def test_the_kind_of_a_gpu_names_all_that_kernels_are_chosen_by(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, version: str
) -> None:
    if text is not None:
        (tmp_path / "version").write_text(text)
    monkeypatch.setattr(hardware, "_DRIVER", tmp_path / "version")
    found = SimpleNamespace(name="NVIDIA H100", multi_processor_count=132)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: found)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.backends.cudnn.version", lambda: 91300)
    assert kind_of(CUDA) == f"NVIDIA H100, 132 SMs, CUDA 13.0, cuDNN 91300, driver {version}"
