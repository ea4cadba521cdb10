"""Fails first when an upgrade of PyTorch moves what is used of its private names, or words a lost peer otherwise."""

import dataclasses
import inspect
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from steadfast.world.allocations import Allocations
from steadfast.world.groups import is_peer_loss, nccl

APP = Path(__file__).parents[2] / "app" / "steadfast"
# A private name, looked up or imported: `torch._foreach_norm`, `from torch.distributed.tensor._utils import ...`.
PRIVATE = re.compile(r"\b(?:torch|dist)(?:\.\w+)*\._[a-z]|^ *from torch[\w.]* import .*\b_\w+", re.MULTILINE)


def parameters(function: Callable[..., object]) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_each_private_name_is_used_in_one_module_that_is_known_here() -> None:
    users = {str(file.relative_to(APP)) for file in APP.rglob("*.py") if PRIVATE.search(file.read_text())}
    assert users == {
        "world/groups.py",
        "world/no_collectives.py",
        "liveness/flight_recorder.py",
        "world/compilation.py",
        "parallel/dtensor.py",
        "loop/buffers.py",
        "orchestration/fork_server.py",
        "optim/optimizer.py",
        "parallel/precision.py",
        "parallel/buckets.py",
        "parallel/deferred.py",
        "parallel/fsdp.py",
        "parallel/stages.py",
        "world/allocations.py",
        "analysis/memory.py",
        "checkpoint/dcp.py",
        "telemetry/memory_history.py",
    }


def test_the_default_group_may_be_replaced_for_a_while_and_names_of_groups_follow_from_a_count() -> None:
    assert isinstance(type(distributed_c10d._world).default_pg, property)
    assert isinstance(distributed_c10d._world.pg_map, dict)
    assert isinstance(distributed_c10d._world.pg_group_ranks, dict)
    assert isinstance(distributed_c10d._world.group_count, int)
    assert "group_count" in inspect.getsource(distributed_c10d._process_group_name)


def test_an_nccl_communicator_can_be_aborted() -> None:
    if not dist.is_nccl_available():
        pytest.skip("this PyTorch has no NCCL")
    assert callable(dist.ProcessGroupNCCL.abort)


def test_the_name_of_nccl_means_the_class_that_this_program_was_written_for() -> None:
    """From 2.15 on torch's "nccl" is another class, and "nccl-legacy" this one."""
    plugin = distributed_c10d.Backend._plugins.get(nccl().upper())
    if plugin is not None:
        source = inspect.getsource(plugin.creator_fn)
    else:  # built in
        source = inspect.getsource(distributed_c10d._new_process_group_helper)
        source = source.partition("elif backend_str == Backend.NCCL:")[2].partition("elif backend_str")[0]
        if not (source or dist.is_nccl_available()):
            pytest.skip("this PyTorch has no NCCL")
    assert re.search(r"\bProcessGroupNCCL\(", source), f"torch {torch.__version__} makes another class of {nccl()}"


def test_what_the_compiler_remembers() -> None:
    from torch._dynamo import utils
    from torch._dynamo.exc import TorchDynamoException
    from torch._dynamo.output_graph import GraphCompileReason
    from torch._inductor import config

    fields = {field.name for field in dataclasses.fields(utils.CompilationMetrics)}
    assert {"start_time_us", "recompile_reason", "duration_us", "co_name"} <= fields
    assert isinstance(utils.get_compilation_metrics(), list)
    assert isinstance(utils.graph_break_reasons, list)
    assert {"reason", "user_stack"} <= {field.name for field in dataclasses.fields(GraphCompileReason)}
    assert issubclass(TorchDynamoException, Exception)
    # What `torch.compile` is given as options.
    assert config.fallback_random is False
    assert config.deterministic is False


def test_adam_collects_its_tensors_in_lists_that_a_step_computes_on() -> None:
    assert issubclass(torch.optim.AdamW, torch.optim.Adam)  # torch.compile wraps the method of each class by itself
    names = ["self", "group", "params_with_grad", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps"]
    assert parameters(torch.optim.Adam._init_group) == names
    assert parameters(torch.optim.AdamW._init_group) == names


def test_allocations_of_tensors_without_data() -> None:
    """One of 4096 bytes, beside the parameter that was there before; and storage that is resized, as by FSDP."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    allocations = Allocations()
    with FakeTensorMode():
        layer = torch.nn.Linear(32, 32, bias=False)
        allocations.add(layer.parameters())
        with allocations:
            layer.weight.detach() * 2
            assert (allocations.bytes, allocations.peak_bytes) == (4096, 8192)
            layer.weight.untyped_storage().resize_(0)
            assert allocations.bytes == 0


def test_a_unit_of_fsdp_keeps_the_gradients_of_several_backwards_in_the_format_of_their_sum() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        layer = torch.nn.Linear(4, 4)
        unit = fully_shard(layer, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
        unit.set_requires_gradient_sync(False)
        layer(torch.ones(1, 4)).sum().backward()
        (group,) = unit._get_fsdp_state()._fsdp_param_groups
        assert len(group.fsdp_params) == 2
        for param in group.fsdp_params:
            assert isinstance(param, FSDPParam)
            assert param.unsharded_accumulated_grad is not None
            formats = param.unsharded_param.dtype, param.reduce_dtype, param.unsharded_accumulated_grad.dtype
            assert formats == (torch.bfloat16, torch.float32, torch.float32)
    finally:
        dist.destroy_process_group()


def test_what_the_allocator_of_cuda_remembers_and_that_a_process_without_a_gpu_may_be_forked() -> None:
    recorded = parameters(torch.cuda.memory._record_memory_history)
    assert {"stacks", "max_entries"} <= set(recorded)
    assert parameters(torch.cuda.memory._dump_snapshot)[0] == "filename"
    assert torch.cuda._is_in_bad_fork() is False


@contextmanager
def group_of_two(as_second: Callable[[Any], object]) -> Iterator[Any]:
    """Yield the first rank's group, while the second rank does something with its own."""
    store, limit = dist.HashStore(), timedelta(seconds=10)
    second = threading.Thread(target=lambda: as_second(dist.ProcessGroupGloo(store, 1, 2, limit)))
    second.start()
    yield dist.ProcessGroupGloo(store, 0, 2, limit)
    second.join()


def refused(group: Any, limit_s: float) -> RuntimeError:
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=limit_s)
    with pytest.raises(RuntimeError) as raised:
        group.allreduce([torch.ones(1)], options).wait()
    assert is_peer_loss(raised.value)
    return raised.value


def test_a_peer_that_ends_is_lost_and_a_mistake_in_the_code_is_none() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.ones(2) @ torch.ones(3)
    assert not is_peer_loss(raised.value)
    with group_of_two(lambda group: None) as group:
        assert fnmatch(str(refused(group, 10)), "*/gloo/transport/tcp/pair.cc:*Connection * by peer*")


def test_a_peer_that_does_not_answer_is_lost_in_this_and_every_later_collective() -> None:
    over = threading.Event()
    with group_of_two(lambda group: over.wait()) as group:
        first, second = refused(group, 0.2), refused(group, 0.2)
        over.set()
    timed_out = "gloo/transport/tcp/unbound_buffer.cc:*] Timed out waiting *ms for recv operation to complete*"
    assert fnmatch(str(first), f"*/{timed_out}")
    assert str(second) == "Application timeout caused pair closure"


def test_a_wait_with_a_limit_ends_without_harm_to_the_collective() -> None:
    late, summed = threading.Event(), torch.ones(1)

    def come_late(group: Any) -> None:
        late.wait()
        group.allreduce([torch.ones(1)]).wait()

    with group_of_two(come_late) as group:
        work = group.allreduce([summed])
        with pytest.raises(RuntimeError, match="timed out"):
            work.wait(timedelta(seconds=0.05))
        assert not work.is_completed()
        late.set()
        work.wait()
    assert summed == 2
