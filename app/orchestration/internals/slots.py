"""A Ray Train worker group of slots, in which the death of one worker is not the end of the others.

A thread of the controller keeps each slot: it asks Ray for an actor, starts the training in it, waits for its death,
and asks again.
"""

# A slot that cannot be placed is a pending actor, which is what an autoscaler sees. A killed worker, a lost node,
# growth and shrinkage are the same thing here, the controller never blocks, and none of it is a failure of the run.
import contextlib
import inspect
import queue
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train import Checkpoint
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.checkpoint.sync_actor import SynchronizationActor
from ray.train.v2._internal.execution.context import DistributedContext, get_train_context
from ray.train.v2._internal.execution.controller import controller
from ray.train.v2._internal.execution.controller.controller import TrainController
from ray.train.v2._internal.execution.training_report import _TrainingReport
from ray.train.v2._internal.execution.worker_group.execution_group import ReplicaGroup
from ray.train.v2._internal.execution.worker_group.state import WorkerGroupState
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker, Worker, WorkerStatus
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup
from ray.train.v2._internal.util import ObjectRefWrapper, bundle_to_remote_args, invoke_context_managers, time_monotonic
from ray.train.v2.api import data_parallel_trainer

from app.orchestration.messages import Leave
from app.orchestration.policies import Quarantine
from app.run.events import NodeQuarantined
from app.run.interrupts import outlive_sigterm

_STEADY_S = 10.0  # a worker that lived so long may be replaced at once
_FIRST_DELAY_S = 0.5  # between the deaths of one that does not
_LONGEST_DELAY_S = 5.0
_SHUTDOWN_S = 5.0
_ASK_S = 10.0
_MOST_PENDING = 8  # slots that wait for room at a time, or as many as are filled

# What is overridden or called below, and with which arguments.
CONTRACT = {
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


def coordinator_name(run_config: Any) -> str:
    """Return the name of a run's coordinator, by which the controller finds it."""
    # Ray starts the controller, so it cannot be handed the coordinator.
    return f"coordinator of {run_config.storage_path}/{run_config.name}"


def find_incompatibility() -> str | None:
    """Return what of Ray's internals is not where slots expect it; None if all of it is."""
    for function, expected in CONTRACT.items():
        found = list(inspect.signature(function).parameters)
        if found != expected:
            return f"{function.__qualname__} takes {found}, expected {expected}"
    overridden = (
        (TrainController, "worker_group_cls"),
        (data_parallel_trainer, "TrainController"),
        (controller, "CheckpointManager"),
    )
    for owner, name in overridden:
        if not hasattr(owner, name):
            return f"{owner.__name__} has no {name}"
    return None


class SlotWorker(RayTrainWorker):
    def __init__(self) -> None:
        super().__init__()
        outlive_sigterm()

    @ray.method(concurrency_group="watch")  # type: ignore[untyped-decorator]
    def park(self) -> None:
        """Never return: by the failure of this call a slot's keeper hears of the actor's death."""
        threading.Event().wait()


@dataclass
class _Slot:
    index: int
    actor: Any = None
    worker: Worker | None = None  # while it trains
    poll: Any = None  # the answer that is awaited
    released: bool = False  # its worker went because it was asked to
    closed: threading.Event = field(default_factory=threading.Event)

    def close(self) -> None:
        self.closed.set()
        if self.actor is not None:
            ray.kill(self.actor)


class SlotWorkerGroup(WorkerGroup):
    """Keep as many slots filled as the coordinator wants, and show them to Ray as one group that does not change."""

    _worker_cls = SlotWorker

    def _start_impl(self, worker_group_state_builder: Any) -> None:
        self._coordinator = ray.get_actor(coordinator_name(self._train_run_context.run_config))
        self._target = self._coordinator.num_slots.remote()  # the answer that is awaited
        self._over = False
        self._quarantine = Quarantine()
        self._slots: list[_Slot] = []
        self._worker_rank_to_replica_group_rank = {rank: rank for rank in range(len(self))}
        with invoke_context_managers([each.on_worker_group_start for each in self._callbacks]):
            for callback in self._callbacks:
                callback.before_worker_group_start(self._worker_group_context)
            here = {ray._raylet.RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id()}
            sync_actor = SynchronizationActor.options(label_selector=here).remote()
            # A placement group would have to fit as a whole, and would be lost as a whole.
            none = SimpleNamespace(placement_group=None, shutdown=lambda: None)
            self._worker_group_state = WorkerGroupState(time_monotonic(), none, [], sync_actor)
            for callback in self._callbacks:
                callback.after_worker_group_start(self)  # no worker yet: slots fill when there is room
            self._open(len(self))
        for callback in self._callbacks:
            callback.after_worker_group_training_start(self)

    def __len__(self) -> int:
        # What Ray takes for the number of workers. There may be more slots by now, or fewer.
        return int(self._worker_group_context.num_workers)

    def get_workers(self) -> list[Worker]:
        return [slot.worker for slot in self._slots if slot.worker]

    def _open(self, count: int) -> None:
        # Workers are told by the coordinator to leave; only slots that nobody fills are closed here.
        opened = [slot for slot in self._slots if not slot.closed.is_set()]
        filled = sum(slot.worker is not None for slot in opened)
        # Each is an actor that waits for room, and a thread that waits for the actor. More follow as these are filled.
        may_wait = max(_MOST_PENDING, filled)
        for _ in range(min(count, filled + may_wait) - len(opened)):
            slot = _Slot(len(self._slots))
            self._slots.append(slot)
            threading.Thread(target=self._keep, args=(slot,), daemon=True, name=f"slot-{slot.index}").start()
        surplus = len(opened) - count
        for slot in reversed(opened):
            if surplus > 0 and slot.worker is None:
                slot.close()
                surplus -= 1

    def _keep(self, slot: _Slot) -> None:
        delay_s = 0.0
        while not slot.closed.is_set():
            began_s = time.monotonic()
            node = None
            slot.actor = self._actor_class().remote()
            if slot.closed.is_set():  # it closed while there was no actor to kill
                ray.kill(slot.actor)
            with contextlib.suppress(RayError):
                metadata = ray.get(slot.actor.get_metadata.remote())  # until there is room; only this thread waits
                began_s = time.monotonic()
                node = metadata.node_id
                self._fill(slot, metadata)
                ray.get(slot.actor.park.remote())
            slot.worker = None
            slot.poll = None
            ray.kill(slot.actor)

            lived_s = time.monotonic() - began_s
            if node and not slot.released and not slot.closed.is_set():
                self._record_death(node, lived_s)
            # A worker that dies at its start would do so again and again.
            if slot.released or lived_s > _STEADY_S:
                delay_s = 0.0
            else:
                delay_s = min(_LONGEST_DELAY_S, 2 * delay_s + _FIRST_DELAY_S)
            slot.released = False
            slot.closed.wait(delay_s)

    def _record_death(self, node: str, lived_s: float) -> None:
        elsewhere = any(worker.metadata.node_id != node for worker in self.get_workers())
        now_s = time.monotonic()
        if self._has_computed_wrongly(node):
            avoided = self._quarantine.avoid(node, now_s, elsewhere)
        else:
            avoided = self._quarantine.record_death(node, lived_s, now_s, elsewhere)
        if avoided:
            self._coordinator.publish.remote(NodeQuarantined(node=node))

    def _has_computed_wrongly(self, node: str) -> bool:
        # Asked now, as the next worker must not come to that node; on this slot's own thread, so nobody else waits.
        with contextlib.suppress(RayError):
            return node in ray.get(self._coordinator.corrupted_nodes.remote(), timeout=_ASK_S)
        return False

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
        self._follow_target()
        asked: dict[Any, _Slot] = {}  # the answer that is awaited -> whose it is
        for slot in self._slots:
            if slot.worker:
                # Not read again from the slot, whose keeper may empty it at any moment.
                question = slot.poll or slot.actor.poll_status.remote()
                slot.poll = question
                asked[question] = slot
        answered: list[Any] = []
        if asked:
            answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout)

        statuses = []
        for question, slot in asked.items():
            status = WorkerStatus(running=True)
            if question in answered:
                slot.poll = None
                with contextlib.suppress(RayError):  # its keeper hears of it too
                    status = ray.get(question)
            statuses.append(status)
            if status.return_value == Leave.RELEASED:
                slot.released = True
                ray.kill(slot.actor)
        return self._as_one(statuses)

    def _as_one(self, statuses: list[WorkerStatus]) -> list[WorkerStatus]:
        # Ray expects as many statuses as it has started workers. The first speaks for all of them.
        first = WorkerStatus(running=False)
        for status in statuses:
            first.running = first.running or status.running
            first.error = first.error or status.error
            first.training_report = first.training_report or status.training_report
            if status.return_value != Leave.RELEASED:
                first.return_value = first.return_value or status.return_value
        # The run ends once one worker is done with it and no other is at work. Until then empty slots may fill.
        self._over = self._over or first.return_value is not None
        first.running = (first.running or not self._over) and first.error is None
        rest = [WorkerStatus(running=False, training_report=first.training_report) for _ in range(len(self) - 1)]
        return [first, *rest]

    def _follow_target(self) -> None:
        answered, _ = ray.wait([self._target], timeout=0)
        if answered:
            count = ray.get(self._target)
            self._target = self._coordinator.num_slots.remote()
            self._over = self._over or count == 0
            if not self._over:
                self._open(count)

    def shutdown(self) -> None:
        self._close()
        super().shutdown()

    def abort(self) -> None:
        self._close()
        super().abort()

    def _close(self) -> None:
        goodbyes = [worker.actor.shutdown.remote() for worker in self.get_workers()]
        for slot in self._slots:
            slot.closed.set()  # so that nobody fills it again
        if goodbyes:
            ray.wait(goodbyes, num_returns=len(goodbyes), timeout=_SHUTDOWN_S)
        for slot in self._slots:
            slot.close()


class LastCommit(CheckpointManager):
    """Ray's register of checkpoints, which names the newest one alone.

    The run's own retention deletes older checkpoints, and Ray refuses to read a register that names a deleted one.
    """

    def register_checkpoint(self, training_report: _TrainingReport) -> None:
        self._checkpoint_results.clear()
        self._checkpoint_to_report_index.clear()
        super().register_checkpoint(training_report)


class SlotController(TrainController):
    worker_group_cls = SlotWorkerGroup

    def __init__(self, *arguments: Any, **named: Any) -> None:
        # The controller has a process of its own, and finds the class of its register under this name.
        controller.CheckpointManager = LastCommit
        super().__init__(*arguments, **named)


class InlineFunction:
    """A training function that travels with calls, in place of a reference to Ray's object store.

    When an agent of an embedded Ray dies, the raylet leaves the cluster and ends. Ray's client then restores each
    object that this process has put into the store, finds no store, and ends the process. So the command puts none.
    """

    def __init__(self, stored: ObjectRefWrapper[Any]) -> None:
        self._pickled = ray.cloudpickle.dumps(stored.get())
        stored._ref = None  # the last reference: the store forgets the function

    def get(self) -> Any:
        return ray.cloudpickle.loads(self._pickled)


@contextlib.contextmanager
def slot_controller() -> Any:
    """Let a trainer that is fitted in this context use a controller of slots."""
    # TorchTrainer has no argument for it, so it finds another controller under the name.
    stock = data_parallel_trainer.TrainController
    data_parallel_trainer.TrainController = SlotController
    try:
        yield
    finally:
        data_parallel_trainer.TrainController = stock


def report(path: str, metrics: dict[str, Any]) -> None:
    """Tell the controller of a checkpoint, as `ray.train.report` would if it did not wait for all ranks."""
    reported = _TrainingReport(checkpoint=Checkpoint(path), metrics=metrics, validation=False)
    reports = get_train_context().get_result_queue()
    # The queue holds one report. The newest one replaces another that the controller has not read yet.
    with contextlib.suppress(queue.Empty):
        reports.get_nowait()
    with contextlib.suppress(queue.Full):
        reports.put_nowait(reported)
