"""A worker's last collectives, on their way to the run directory. Of NCCL there is none here, and gloo has its own."""

import os
import pickle
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from steadfast.liveness import flight_recorder
from steadfast.liveness.flight_recorder import FlightRecorder, pack, unpack


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        monkeypatch.setenv(name, "")  # so that it is taken away again
        monkeypatch.delenv(name)
    return monkeypatch


def read(recorder: FlightRecorder) -> str:
    recorder.read()
    if recorder._reading is not None:
        recorder._reading.join()  # on a busy machine
    return recorder.take()


def test_the_collectives_of_gloo_are_read_once() -> None:
    recorder = FlightRecorder("cpu")
    group: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    group.allreduce([torch.ones(4321)]).wait()
    record = pickle.loads(unpack(read(recorder)))
    assert record["entries"][-1]["profiling_name"] == "gloo:all_reduce"
    assert record["entries"][-1]["input_sizes"] == [[4321]]
    assert recorder.take() == ""


def test_the_size_is_told_to_torch_unless_the_environment_has_one(
    environment: pytest.MonkeyPatch,
) -> None:
    FlightRecorder("cpu")
    assert os.environ.pop("TORCH_FR_BUFFER_SIZE") == "2000"
    environment.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "50")
    FlightRecorder("cpu")
    assert "TORCH_FR_BUFFER_SIZE" not in os.environ


def test_on_a_gpu_it_is_the_record_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def dump(**options: bool) -> bytes:
        asked.append(options)
        return b"of nccl"

    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace", dump, raising=False)
    assert unpack(read(FlightRecorder("cuda"))) == b"of nccl"
    assert asked == [{"includeStackTraces": False, "onlyActive": False}]


def test_of_a_record_that_is_too_long_what_is_under_way_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    records = {False: os.urandom(2**19), True: b"active"}
    monkeypatch.setattr(flight_recorder, "_recorded", lambda device, only_active: records[only_active])
    assert unpack(read(FlightRecorder("cpu"))) == b"active"


def test_a_device_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    asked = []

    def recorded(device: str, only_active: bool) -> bytes:
        asked.append(device)
        answered.wait(10)
        return b"late"

    monkeypatch.setattr(flight_recorder, "_recorded", recorded)
    recorder = FlightRecorder("cuda")
    began_s = time.monotonic()
    recorder.read()
    recorder.read()  # again, while nothing has come
    assert time.monotonic() - began_s < 4
    assert recorder.take() == ""
    assert asked == ["cuda"]
    answered.set()
    assert recorder._reading is not None
    recorder._reading.join()
    assert unpack(recorder.take()) == b"late"


@pytest.mark.parametrize("packed", ["no base64!", "bm8gemxpYg=="])
def test_what_is_no_record_is_an_error_that_heartbeats_know(packed: str) -> None:
    assert unpack(pack(b"a record")) == b"a record"
    with pytest.raises(ValueError, match=r"record|base64|padding"):
        unpack(packed)
