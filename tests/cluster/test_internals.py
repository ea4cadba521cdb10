"""Fails first when a Ray upgrade moves what we use of its internals."""

import inspect
import pickle
import signal
from pathlib import Path

import pytest
import ray._private.state
import ray.actor
from ray._private import services, utils, worker
from ray._private.node import Node
from ray.autoscaler._private.local.node_provider import LocalNodeProvider
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.controller import controller
from ray.train.v2._internal.execution.scaling_policy import scaling_policy
from ray.train.v2._internal.execution.training_report import _TrainingReport
from ray.train.v2._internal.execution.worker_group.execution_group import ReplicaGroup
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup
from ray.train.v2._internal.util import ObjectRefWrapper
from ray.train.v2.api import data_parallel_trainer

from steadfast.errors import UsageError
from steadfast.orchestration.internals import (
    current_cluster,
    keep_sigterm_handler,
    on_loopback,
    other_class_ids,
    remember_head,
    without_idle_actors,
    without_services,
)
from steadfast.orchestration.internals.slots import NoBarrier

# Parameters of Ray's internal functions that slots override or call.
PARAMETERS = {
    WorkerGroup._start_impl: ["self", "worker_group_state_builder"],
    WorkerGroup._poll_workers_and_collect_errors: ["self", "timeout"],
    WorkerGroup._init_train_context: ["self", "workers", "sync_actor"],
    WorkerGroup._get_worker_runtime_env: ["custom_runtime_env"],
    WorkerGroup.shutdown: ["self"],
    WorkerGroup.abort: ["self"],
    ReplicaGroup.start_training: ["self", "worker_group_context"],
    CheckpointManager.register_checkpoint: ["self", "training_report"],
    ObjectRefWrapper.get: ["self"],
    _TrainingReport.__init__: ["self", "checkpoint", "metrics", "validation"],
}
OVERRIDDEN = (
    (controller.TrainController, "worker_group_cls"),
    (data_parallel_trainer, "TrainController"),
    (controller, "CheckpointManager"),
    (scaling_policy, "TrainAutoscalingCoordinatorClient"),
)


def test_ray_sets_its_sigterm_handlers_by_a_function_that_can_be_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(utils, "set_sigterm_handler", utils.set_sigterm_handler)  # put back after the test
    former = signal.getsignal(signal.SIGTERM)
    keep_sigterm_handler()
    utils.set_sigterm_handler(signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is former
    for function in (inspect.unwrap(worker.init), Node._register_shutdown_hooks):
        assert "set_sigterm_handler" in function.__code__.co_names


def test_the_callbacks_that_start_idle_actors_are_among_the_default_ones() -> None:
    callbacks = TorchTrainer(lambda: None)._create_default_callbacks()
    left_out = {type(each).__name__ for each in callbacks} - {type(e).__name__ for e in without_idle_actors(callbacks)}
    assert left_out == {"DatasetsCallback", "PlacementGroupCleanerCallback"}


def test_the_services_that_a_run_does_not_use_are_started_by_functions_that_can_be_replaced() -> None:
    starts = {*Node.start_head_processes.__code__.co_names, *Node.start_ray_processes.__code__.co_names}
    with without_services(log_monitor=False):
        replaced = {name for name in starts if inspect.isfunction(getattr(Node, name, None))}
        replaced = {name for name in replaced if getattr(Node, name).__module__ != Node.__module__}
    assert replaced == {"start_monitor", "start_api_server", "start_log_monitor"}


def test_ids_of_actor_classes_and_messages_of_raylets_come_by_names_that_can_be_replaced() -> None:
    assert list(inspect.signature(worker.print_to_stdstream).parameters) == ["data", "ignore_prefix"]
    assert "print_to_stdstream" in worker.listen_error_messages.__code__.co_names
    assert "ActorClassID" in ray.actor._make_actor.__code__.co_names
    with other_class_ids():
        drawn = {ray.actor.ActorClassID.from_random().hex() for _ in range(2)}
    assert len(drawn) == 2


def test_what_slots_override_is_where_it_was_and_a_call_that_would_wait_for_all_says_what_to_do() -> None:
    for function, expected in PARAMETERS.items():
        assert list(inspect.signature(function).parameters) == expected, function.__qualname__
    for owner, name in OVERRIDDEN:
        assert hasattr(owner, name)
    barrier = pickle.loads(pickle.dumps(NoBarrier()))
    with pytest.raises(UsageError, match="Return metrics in Sums"):
        barrier.broadcast_from_rank_zero.remote()


def test_what_ray_notes_of_a_cluster_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # where Ray keeps what it knows of such clusters
    (tmp_path / "ray").mkdir()
    assert current_cluster() is None
    utils.write_ray_address("192.0.2.10:6379")
    assert current_cluster() == "192.0.2.10:6379"
    provider = {"type": "local", "head_ip": "192.0.2.10", "worker_ips": ["192.0.2.11"]}
    remember_head({"cluster_name": "ours", "provider": provider})
    found = LocalNodeProvider(provider, "ours").non_terminated_nodes({"ray-node-type": "head"})
    assert found == ["192.0.2.10"]


def test_ray_makes_the_machines_address_of_the_loopback_by_a_function_that_can_be_replaced() -> None:
    assert list(inspect.signature(services.resolve_ip_for_localhost).parameters) == ["host"]
    with on_loopback():
        assert services.resolve_ip_for_localhost("127.0.0.1") == "127.0.0.1"
    assert "services.resolve_ip_for_localhost(_node_ip_address)" in inspect.getsource(worker.init)
