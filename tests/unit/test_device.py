"""Which device a worker takes, and how it computes, with a fake in place of CUDA."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from steadfast import worker
from steadfast.config import Config, parse_config
from steadfast.errors import GpuUnusable, UsageError
from steadfast.guards.failures import FailureKind, failure_kind
from steadfast.launch.torchrun import run_under_torchrun
from steadfast.orchestration import worker_runtime
from steadfast.orchestration.objects import Objects
from steadfast.orchestration.worker_runtime import RayRuntime, WorkerSpec
from steadfast.run.directory import RunDirectory
from steadfast.telemetry.console import Console
from steadfast.world import device as device_module
from steadfast.world.device import (
    DETERMINISTIC,
    assigned_device,
    cores_of_a_worker,
    gather_gpus,
    set_numerics,
    started,
    torchrun_device,
    variables_kept,
)
from steadfast.world.groups import interface_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class FakeCuda:
    """A machine's GPUs, as far as choosing one goes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.current: int | None = None
        self.faults: dict[str, BaseException] = {}  # function -> its exception
        monkeypatch.setattr(torch.cuda, "is_available", lambda: self.count > 0 and not self.faults)
        monkeypatch.setattr(torch.cuda, "init", lambda: self._call("init"))
        monkeypatch.setattr(device_module, "probe", lambda device: self._call("probe"))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: self.count)
        monkeypatch.setattr(torch.cuda, "set_device", self._set_device)

    def _set_device(self, device: torch.device) -> None:
        self._call("set_device")
        assert device.index < self.count, "invalid device ordinal"
        self.current = device.index

    def _call(self, name: str) -> None:
        if name in self.faults:
            raise self.faults[name]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Take back what a test does to the environment, also to variables that are not there yet."""
    names = (*DETERMINISTIC, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCH_NCCL_BLOCKING_WAIT", "STEADFAST_LABEL")
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def numerics() -> Iterator[None]:
    """Take back what a test does to the way in which this process computes."""
    matmul, convolutions = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    benchmark = torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, convolutions


@pytest.mark.parametrize(
    ("gpu_ids", "num_visible", "visible", "device"),
    [
        ([], 0, None, CPU),
        ([], 8, None, CPU),  # Ray does not hide a machine's GPUs from a worker that has been assigned none
        (["5"], 1, "5", CUDA),  # and shows one that has been assigned some just these
        (["5"], 1, None, CUDA),
        # Under RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES it hides none.
        (["5"], 8, None, torch.device("cuda", 5)),
        (["5"], 4, "4,5,6,7", torch.device("cuda", 1)),
        (["GPU-2"], 2, "GPU-1,GPU-2", torch.device("cuda", 1)),
    ],
)
def test_a_worker_of_ray_takes_the_gpu_that_it_was_assigned(
    cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    gpu_ids: list[str],
    num_visible: int,
    visible: str | None,
    device: torch.device,
) -> None:
    cuda.count = num_visible
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert assigned_device(gpu_ids) == device
    started(device)
    assert cuda.current == device.index


@pytest.mark.parametrize(
    ("function", "fault", "sentence"),
    [
        ("init", AssertionError("Torch not compiled with CUDA enabled"), "Torch not compiled with CUDA enabled. Look"),
        ("init", RuntimeError("The NVIDIA driver on your system is too old (found version 12080)."), "12080). Look"),
        ("set_device", RuntimeError("CUDA error: invalid device ordinal\nGPU device may be"), "device ordinal. Look"),
        ("probe", RuntimeError("CUDA error: no kernel image is available\nSearch for"), "is available. Look"),
    ],
)
@pytest.mark.parametrize("wanted", ["auto", 1])
def test_gpu_that_torch_cannot_use_is_an_error_with_torchs_sentence(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, function: str, fault: Exception, sentence: str, wanted: Any
) -> None:
    cuda.count = 1
    cuda.faults[function] = fault
    with pytest.raises(GpuUnusable, match=re.escape(sentence)) as raised:
        started(assigned_device(["0"]))
    assert failure_kind(raised.value) is FailureKind.DEVICE
    monkeypatch.setattr(os, "listdir", lambda folder: ["nvidia0"])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(GpuUnusable, match=re.escape(sentence)):
        torchrun_device(wanted)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the user hides the GPUs
    assert wanted == 1 or torchrun_device(wanted) == CPU


@pytest.mark.parametrize(
    ("wanted", "num_gpus", "num_ranks", "device"),
    [
        ("auto", 0, 4, CPU),
        ("auto", 4, 4, torch.device("cuda", 1)),
        (1, 4, 2, torch.device("cuda", 1)),
        (0, 1, 4, CPU),
        (0, 4, 4, CPU),
    ],
)
def test_a_rank_of_torchrun_takes_the_gpu_of_its_number(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, wanted: Any, num_gpus: int, num_ranks: int, device: torch.device
) -> None:
    cuda.count = num_gpus
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert torchrun_device(wanted) == device
    assert cuda.current == device.index


@pytest.mark.parametrize(
    ("num_ranks", "devices", "expected"),
    [
        ("4", ["nvidia0"], 4),  # as torchrun says
        (None, ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"], 8),
        (None, [f"nvidia{number}" for number in range(32)], 1),
        (None, ["null"], 16),
    ],
)
def test_the_cores_of_a_machine_are_for_all_workers_on_it(
    monkeypatch: pytest.MonkeyPatch, num_ranks: str | None, devices: list[str], expected: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    if num_ranks:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", num_ranks)
    monkeypatch.setattr(os, "listdir", lambda folder: devices)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    assert cores_of_a_worker() == expected


@pytest.mark.parametrize(("wanted", "num_gpus"), [("auto", 1), ("1", 1)])
def test_more_ranks_than_gpus_under_torchrun_are_one_clear_error(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wanted: str, num_gpus: int
) -> None:
    cuda.count = num_gpus
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    config = parse_config("", "x.yaml", [f"run.storage={tmp_path}", f"scaling.gpus_per_worker={wanted}"])
    with pytest.raises(UsageError) as raised:
        run_under_torchrun(config, 0.0, Console())  # before it looks for the others, who would wait for it
    assert f"has started 2 rank(s) on this machine, which has {num_gpus} GPU(s)" in str(raised.value)
    assert "Lower --nproc-per-node, or train on the CPU with scaling.gpus_per_worker=0" in str(raised.value)


@pytest.mark.parametrize("own", [None, "eth7"])
@pytest.mark.parametrize("gpu_ids", [[], ["3"]])
def test_ray_says_what_the_device_is_and_the_heartbeats_which_interface(
    cuda: FakeCuda, variables: pytest.MonkeyPatch, tmp_path: Path, gpu_ids: list[str], own: str | None
) -> None:
    context = SimpleNamespace(
        get_accelerator_ids=lambda: {"GPU": gpu_ids, "TPU": []},
        current_actor=None,
        get_node_id=lambda: "node",
        get_node_labels=dict,
    )
    ray = SimpleNamespace(get_runtime_context=lambda: context, get=lambda answer, timeout=None: answer)
    port, secret = SimpleNamespace(remote=lambda: 1), SimpleNamespace(remote=lambda _: "secret")
    coordinator = SimpleNamespace(heartbeat_port=port, admit=secret)
    variables.setattr(worker_runtime, "ray", ray)
    variables.setattr(worker_runtime, "HeartbeatClient", lambda *_: SimpleNamespace(own_address="127.0.0.1"))
    if own is not None:
        variables.setenv("NCCL_SOCKET_IFNAME", own)
    cuda.count = 1 if gpu_ids else 8  # Ray hides the others from a worker that has one
    config = Config()
    runtime = RayRuntime(WorkerSpec(config, RunDirectory.of(config), coordinator, "127.0.0.1", tmp_path, Objects(b"")))
    assert runtime.device == (CUDA if gpu_ids else CPU)
    loopback = interface_of("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == loopback
    assert os.environ["NCCL_SOCKET_IFNAME"] == (own or f"={loopback}")


def test_a_world_on_cpus_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist, "all_gather_object")
    assert gather_gpus(CPU, 2, None) == ()  # type: ignore[arg-type]


@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_is_on_where_it_is_asked_for(numerics: None, tf32: bool) -> None:
    set_numerics(tf32, deterministic=False)
    cudnn: Any = torch.backends.cudnn
    formats = {torch.backends.cuda.matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision}
    assert formats == ({"tf32"} if tf32 else {"ieee", "none"})  # "none": nothing but fp32 itself
    assert not torch.are_deterministic_algorithms_enabled()
    # What a user's code may ask, or use, goes on working.
    assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
        pass


def test_deterministic_sets_what_is_not_set(numerics: None, variables: pytest.MonkeyPatch) -> None:
    variables.setenv("NCCL_ALGO", "Tree")
    torch.backends.cudnn.benchmark = True
    set_numerics(tf32=False, deterministic=True)
    assert {name: os.environ[name] for name in DETERMINISTIC} == DETERMINISTIC | {"NCCL_ALGO": "Tree"}
    assert variables_kept() == ("NCCL_ALGO=Tree",)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark


def test_worker_sets_numerics_before_it_builds(numerics: None, variables: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[tuple[bool, str | None]] = []

    class Enough(Exception):
        pass

    def build(*_: object) -> None:
        seen.append((torch.are_deterministic_algorithms_enabled(), os.environ.get("NCCL_ALGO")))
        raise Enough

    variables.setattr(worker, "WorkerState", build)
    told: list[BaseException] = []
    runtime: Any = SimpleNamespace(device=CPU, failed=lambda step, error: told.append(error))
    config = parse_config("", "x.yaml", [f"run.storage={tmp_path}", "run.deterministic=true", "precision.tf32=true"])
    assert worker.work(config, runtime, RunDirectory.of(config)) is None
    assert isinstance(told[0], Enough)
    assert seen == [(True, "Ring")]
    assert torch.backends.cuda.matmul.allow_tf32
