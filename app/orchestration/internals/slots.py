"""A Ray Train worker group of slots. A slot is kept by one thread of the controller: it asks for an actor, starts the
training in it, waits for its death, and asks again.

A slot that cannot be placed is a pending actor, which is what an autoscaler sees. A killed worker, a lost node, growth
and shrinkage are the same thing here, the controller never blocks, and none of it counts as a failure of the run.
"""

from __future__ import annotations

import contextlib
import inspect
import queue
import threading
import time
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train import Checkpoint
from ray.train.v2._internal.execution.checkpoint.sync_actor import SynchronizationActor
from ray.train.v2._internal.execution.context import DistributedContext, get_train_context
from ray.train.v2._internal.execution.controller.controller import TrainController
from ray.train.v2._internal.execution.training_report import _TrainingReport
from ray.train.v2._internal.execution.worker_group.execution_group import ReplicaGroup
from ray.train.v2._internal.execution.worker_group.state import WorkerGroupState
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker, Worker, WorkerStatus
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup
from ray.train.v2._internal.util import bundle_to_remote_args, invoke_context_managers, time_monotonic
from ray.train.v2.api import data_parallel_trainer

from app.orchestration.messages import Dismissal
from app.orchestration.policies import Quarantine

_STEADY_S = 10.0  # a worker that lived so long may be replaced at once
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 5.0  # between the deaths of one that does not
_SHUTDOWN_S = 5.0

# What is overridden or called below, and with which arguments.
CONTRACT = {
    WorkerGroup._start_impl: ["self", "worker_group_state_builder"],
    WorkerGroup._poll_workers_and_collect_errors: ["self", "timeout"],
    WorkerGroup._init_train_context: ["self", "workers", "sync_actor"],
    WorkerGroup._get_worker_runtime_env: ["custom_runtime_env"],
    WorkerGroup.replace_replica_group: ["self", "replica_group_index"],
    WorkerGroup.shutdown: ["self"],
    WorkerGroup.abort: ["self"],
    ReplicaGroup.start_training: ["self", "worker_group_context"],
    _TrainingReport.__init__: ["self", "checkpoint", "metrics", "validation"],
}


def coordinator_name(run_config: Any) -> str:
    """The name of a run's coordinator: the controller, which Ray starts, has no other way to it."""
    return f"coordinator of {run_config.storage_path}/{run_config.name}"


def moved() -> str | None:
    """What of Ray's internals is not where slots expect it; None if all of it is."""
    for function, expected in CONTRACT.items():
        found = list(inspect.signature(function).parameters)
        if found != expected:
            return f"{function.__qualname__} takes {found}, expected {expected}"
    for owner, name in ((TrainController, "worker_group_cls"), (data_parallel_trainer, "TrainController")):
        if not hasattr(owner, name):
            return f"{owner.__name__} has no {name}"
    return None


class SlotWorker(RayTrainWorker):
    @ray.method(concurrency_group="watch")  # type: ignore[untyped-decorator]
    def park(self) -> None:
        """Never returns: that it fails is how the keeper hears of this actor's death."""
        threading.Event().wait()


class _NoPlacementGroup:
    placement_group = None

    def shutdown(self) -> None:
        pass


class _Slot:
    def __init__(self, index: int) -> None:
        self.index = index
        self.actor: Any = None
        self.worker: Worker | None = None  # while it trains
        self.poll: Any = None  # the answer that is awaited
        self.left = False  # its worker went because it was asked to
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()
        if self.actor is not None:
            ray.kill(self.actor)


class SlotWorkerGroup(WorkerGroup):
    _worker_cls = SlotWorker

    def _start_impl(self, worker_group_state_builder: Any) -> None:
        context = self._worker_group_context
        self._coordinator = ray.get_actor(coordinator_name(self._train_run_context.run_config))
        self._question = self._coordinator.slots.remote()
        self._over = False
        self._quarantine = Quarantine()
        self._slots: list[_Slot] = []
        self._worker_rank_to_replica_group_rank = {rank: rank for rank in range(len(self))}
        with invoke_context_managers([each.on_worker_group_start for each in self._callbacks]):
            for callback in self._callbacks:
                callback.before_worker_group_start(context)
            here = {ray._raylet.RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id()}
            sync_actor = SynchronizationActor.options(label_selector=here).remote()
            self._worker_group_state = WorkerGroupState(time_monotonic(), _NoPlacementGroup(), [], sync_actor)
            for callback in self._callbacks:
                callback.after_worker_group_start(self)  # no worker yet: slots fill when there is room
            self._open(len(self))
        for callback in self._callbacks:
            callback.after_worker_group_training_start(self)

    def __len__(self) -> int:
        """What Ray takes for the number of workers; there may be more slots by now, or fewer."""
        return int(self._worker_group_context.num_workers)

    def get_workers(self) -> list[Worker]:
        return [slot.worker for slot in self._slots if slot.worker]

    def _open(self, count: int) -> None:
        """Opens or closes slots until `count` are open: first those that nobody fills."""
        opened = [slot for slot in self._slots if not slot.closed.is_set()]
        for _ in range(count - len(opened)):
            slot = _Slot(len(self._slots))
            self._slots.append(slot)
            threading.Thread(target=self._keep, args=(slot,), daemon=True, name=f"slot-{slot.index}").start()
        vacant = [slot for slot in reversed(opened) if slot.worker is None]
        for slot in vacant[: max(0, len(opened) - count)]:
            slot.close()

    def _keep(self, slot: _Slot) -> None:
        delay_s = 0.0
        while not slot.closed.is_set():
            began, node = time.monotonic(), None
            slot.actor = self._actor_class().remote()
            if slot.closed.is_set():  # it closed while there was no actor to kill
                ray.kill(slot.actor)
            with contextlib.suppress(RayError):
                metadata = ray.get(slot.actor.get_metadata.remote())  # until there is room; only this thread waits
                began, node = time.monotonic(), metadata.node_id
                self._fill(slot, metadata)
                ray.get(slot.actor.park.remote())
            slot.worker = slot.poll = None
            ray.kill(slot.actor)
            lived_s = time.monotonic() - began
            if node and not slot.left and not slot.closed.is_set():
                self._suspect(node, lived_s)
            steady = slot.left or lived_s > _STEADY_S
            delay_s = 0.0 if steady else min(_LONGEST_DELAY_S, 2 * delay_s + _FIRST_DELAY_S)
            slot.left = False
            slot.closed.wait(delay_s)

    def _suspect(self, node: str, lived_s: float) -> None:
        elsewhere = any(worker.metadata.node_id != node for worker in self.get_workers())
        if self._quarantine.died(node, lived_s, time.monotonic(), elsewhere):
            self._coordinator.publish.remote({"event": "node_quarantined", "node": node})

    def _actor_class(self) -> Any:
        context = self._worker_group_context
        selector = dict((context.label_selector or [{}])[0])
        if avoided := self._quarantine.avoided(time.monotonic()):
            selector[ray._raylet.RAY_NODE_ID_KEY] = f"!in({','.join(avoided)})"
        return ray.remote(
            runtime_env=self._get_worker_runtime_env(self._train_run_context.run_config.worker_runtime_env),
            concurrency_groups={"watch": 1},
            scheduling_strategy="SPREAD" if context.placement_strategy.endswith("SPREAD") else "DEFAULT",
            label_selector=selector,
            **bundle_to_remote_args(context.resources_per_worker),
        )(self._worker_cls)

    def _fill(self, slot: _Slot, metadata: Any) -> None:
        context = self._worker_group_context
        worker = Worker(slot.actor, metadata, context.resources_per_worker, placement_group_bundle_index=slot.index)
        # Ray's idea of ranks is of slots, and static; the worker's world is the runtime's.
        worker.distributed_context = DistributedContext(
            local_rank=0, local_world_size=1, world_rank=slot.index, world_size=len(self), node_rank=0
        )
        self._init_train_context([worker], self._worker_group_state.sync_actor)
        group = ReplicaGroup([worker], context.resources_per_worker, self._replica_group_callbacks)
        group.start_training(context)
        slot.worker = worker

    def _poll_workers_and_collect_errors(self, timeout: float | None) -> list[WorkerStatus]:
        self._follow_orders()
        asked = {slot.index: self._ask(slot) for slot in self._slots if slot.worker}
        answered, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout) if asked else ([], [])
        statuses = []
        for index, question in asked.items():
            status = WorkerStatus(running=True)
            if question in answered:
                self._slots[index].poll = None
                with contextlib.suppress(RayError):  # its keeper hears of it too
                    status = ray.get(question)
            statuses.append(status)
            if status.return_value == Dismissal.LEFT:
                self._slots[index].left = True
                ray.kill(self._slots[index].actor)
        return self._as_one(statuses)

    def _as_one(self, statuses: list[WorkerStatus]) -> list[WorkerStatus]:
        """As many as Ray counts on, of which the first speaks for all: one report, one error, and an end once one
        worker is done with the run and no other is at work. Until then empty slots may fill."""
        done = next((each.return_value for each in statuses if each.return_value not in (None, Dismissal.LEFT)), None)
        self._over = self._over or done is not None
        first = WorkerStatus(
            running=any(each.running for each in statuses) or not self._over,
            error=next((each.error for each in statuses if each.error), None),
            return_value=done,
            training_report=next((each.training_report for each in statuses if each.training_report), None),
        )
        first.running = first.running and first.error is None
        rest = [WorkerStatus(running=False, training_report=first.training_report) for _ in range(len(self) - 1)]
        return [first, *rest]

    def _follow_orders(self) -> None:
        answered, _ = ray.wait([self._question], timeout=0)
        if answered:
            orders = ray.get(self._question)
            self._question = self._coordinator.slots.remote()
            self._over = self._over or orders.over
            if not self._over:
                self._open(orders.count)

    def _ask(self, slot: _Slot) -> Any:
        slot.poll = slot.poll or slot.actor.poll_status.remote()
        return slot.poll

    def replace_replica_group(self, replica_group_index: int) -> None:
        ray.kill(self._slots[replica_group_index].actor)  # its keeper does the rest

    def shutdown(self) -> None:
        self._close()
        super().shutdown()

    def abort(self) -> None:
        self._close()
        super().abort()

    def _close(self) -> None:
        goodbyes = [worker.actor.shutdown.remote() for worker in self.get_workers()]
        for slot in self._slots:
            slot.closed.set()
        if goodbyes:
            ray.wait(goodbyes, num_returns=len(goodbyes), timeout=_SHUTDOWN_S)
        for slot in self._slots:
            slot.close()


class SlotController(TrainController):
    worker_group_cls = SlotWorkerGroup


@contextlib.contextmanager
def slot_controller() -> Any:
    """TorchTrainer has no argument for its controller, so it finds another one under the name."""
    stock, data_parallel_trainer.TrainController = data_parallel_trainer.TrainController, SlotController
    try:
        yield
    finally:
        data_parallel_trainer.TrainController = stock


def report(path: str, metrics: dict[str, Any]) -> None:
    """Tells the controller of a checkpoint, as `ray.train.report` would if it did not wait for all ranks."""
    reported = _TrainingReport(checkpoint=Checkpoint(path), metrics=metrics, validation=False)
    with contextlib.suppress(queue.Full):  # nothing reads it back
        get_train_context().get_result_queue().put_nowait(reported)
