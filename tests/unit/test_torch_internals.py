"""Fails first when an upgrade of PyTorch moves what is used of its private names, or words a lost peer otherwise."""

from __future__ import annotations

import dataclasses
import inspect
import re
import threading
from collections.abc import Callable
from datetime import timedelta
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import _utils
from torch.utils import _pytree as pytree

from steadfast.parallel.deferred import build_without_memory
from steadfast.world.allocations import Allocations
from steadfast.world.groups import is_peer_loss

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


def test_process_groups() -> None:
    assert not parameters(distributed_c10d._get_default_group)
    assert isinstance(distributed_c10d._world.group_count, int)
    assert callable(dist.ProcessGroup._get_backend)
    assert callable(dist.ProcessGroup.allreduce)  # what the control channel calls in place of dist.all_reduce


def test_the_default_group_may_be_replaced_for_a_while() -> None:
    assert isinstance(type(distributed_c10d._world).default_pg, property)
    assert isinstance(distributed_c10d._world.pg_map, dict)
    assert isinstance(distributed_c10d._world.pg_group_ranks, dict)


def test_names_of_groups_follow_from_the_count_that_is_reset() -> None:
    assert "group_count" in inspect.getsource(distributed_c10d._process_group_name)


def test_metadata_of_dcp_name_the_classes_that_are_allowed() -> None:
    assert inspect.isclass(filesystem._StorageInfo)
    assert inspect.isclass(metadata._MEM_FORMAT_ENCODING)
    assert callable(torch.serialization._get_layout)


def test_an_nccl_communicator_can_be_aborted() -> None:
    if not dist.is_nccl_available():
        pytest.skip("this PyTorch has no NCCL")
    assert callable(dist.ProcessGroupNCCL.abort)


def test_compilations_are_told_to_whoever_asks() -> None:
    from torch._dynamo.callback import callback_handler

    assert parameters(callback_handler.register_start_callback) == ["callback"]
    assert parameters(callback_handler.register_end_callback) == ["callback"]


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


def test_the_place_of_a_shard_in_its_tensor() -> None:
    assert parameters(_utils.compute_local_shape_and_global_offset)[:3] == ["global_shape", "mesh", "placements"]


def test_adam_collects_its_tensors_in_lists_that_a_step_computes_on() -> None:
    assert issubclass(torch.optim.AdamW, torch.optim.Adam)  # torch.compile wraps the method of each class by itself
    names = ["self", "group", "params_with_grad", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps"]
    assert parameters(torch.optim.Adam._init_group) == names
    assert parameters(torch.optim.AdamW._init_group) == names


def test_a_construction_is_written_down_and_done_later() -> None:
    model, values = build_without_memory(lambda: torch.nn.Linear(3, 2))
    weight = torch.zeros(2, 3)
    values.fill({"weight": weight})
    assert model.weight.is_meta
    assert weight.any()


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


def test_collectives_that_send_nothing() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    try:
        left_alone = torch.ones(2)
        distributed_c10d._get_default_group().allreduce([left_alone]).wait()
        assert dist.get_world_size() == 3
        assert left_alone.tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()


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
            assert param.unsharded_param.dtype == torch.bfloat16
            assert param.reduce_dtype == torch.float32
            assert isinstance(param, FSDPParam)
            assert param.unsharded_accumulated_grad is not None
            assert param.unsharded_accumulated_grad.dtype == torch.float32
    finally:
        dist.destroy_process_group()


def test_outputs_of_layers_are_taken_apart_and_put_together() -> None:
    leaves, structure = pytree.tree_flatten({"hidden": torch.ones(2), "cache": (None, 3)})
    assert len(leaves) == structure.num_leaves == 3
    assert pytree.tree_unflatten(leaves, structure)["cache"] == (None, 3)
    assert pytree.tree_leaves([1, (2,)]) == [1, 2]


def test_what_the_allocator_of_cuda_remembers() -> None:
    recorded = parameters(torch.cuda.memory._record_memory_history)
    assert {"stacks", "max_entries"} <= set(recorded)
    assert parameters(torch.cuda.memory._dump_snapshot)[0] == "filename"


def test_operations_on_many_tensors_at_once() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([6.0, 8.0])]
    assert [float(norm) for norm in torch._foreach_norm(tensors)] == [5.0, 10.0]
    torch._foreach_mul_(tensors, 2.0)
    torch._foreach_mul_(tensors, torch.tensor(0.5))
    assert [each.tolist() for each in tensors] == [[3.0, 4.0], [6.0, 8.0]]


@pytest.mark.parametrize(
    ("peer_stays", "message"),
    [
        (False, "gloo/transport/tcp/pair.cc:*Connection * by peer*"),
        (True, "gloo/transport/tcp/unbound_buffer.cc:*] Timed out waiting *ms for recv operation to complete*"),
    ],
)
def test_a_lost_peer_is_told_by_gloos_two_messages(peer_stays: bool, message: str) -> None:
    """It ends, or does not answer: the two that `is_peer_loss` has to tell from a mistake in the code."""
    store = dist.HashStore()
    over = threading.Event()

    def peer() -> None:
        group = dist.ProcessGroupGloo(store, 1, 2, timedelta(seconds=10))
        if peer_stays:
            over.wait()
        del group

    thread = threading.Thread(target=peer)
    thread.start()
    group: Any = dist.ProcessGroupGloo(store, 0, 2, timedelta(seconds=10))
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=0.2 if peer_stays else 10)
    with pytest.raises(RuntimeError) as raised:
        group.allreduce([torch.ones(1)], options).wait()
    over.set()
    thread.join()
    assert fnmatch(str(raised.value), f"*/{message}")
    assert is_peer_loss(raised.value)


def test_a_group_that_has_timed_out_tells_of_it_in_every_later_collective() -> None:
    store = dist.HashStore()
    over = threading.Event()

    def peer() -> None:
        group = dist.ProcessGroupGloo(store, 1, 2, timedelta(seconds=10))
        over.wait()
        del group

    thread = threading.Thread(target=peer)
    thread.start()
    group: Any = dist.ProcessGroupGloo(store, 0, 2, timedelta(seconds=10))
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=0.2)
    errors = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised:
            group.allreduce([torch.ones(1)], options).wait()
        errors.append(raised.value)
    over.set()
    thread.join()
    assert str(errors[1]) == "Application timeout caused pair closure"
    assert is_peer_loss(errors[1])


def test_a_wait_with_a_limit_ends_without_harm_to_the_collective() -> None:
    store = dist.HashStore()
    late = threading.Event()
    summed = torch.ones(1)

    def peer() -> None:
        group: Any = dist.ProcessGroupGloo(store, 1, 2, timedelta(seconds=10))
        late.wait()
        group.allreduce([torch.ones(1)]).wait()

    thread = threading.Thread(target=peer)
    thread.start()
    group: Any = dist.ProcessGroupGloo(store, 0, 2, timedelta(seconds=10))
    work = group.allreduce([summed])
    with pytest.raises(RuntimeError, match="timed out"):
        work.wait(timedelta(seconds=0.05))
    assert not work.is_completed()
    late.set()
    work.wait()
    thread.join()
    assert summed == 2


def test_a_process_that_has_not_used_a_gpu_may_be_forked() -> None:
    assert torch.cuda._is_in_bad_fork() is False


def test_a_mistake_in_the_code_is_no_lost_peer() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.ones(2) @ torch.ones(3)
    assert not is_peer_loss(raised.value)
