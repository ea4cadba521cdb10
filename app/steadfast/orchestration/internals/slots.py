"""A Ray Train worker group whose workers survive each other's death.

One thread of the controller keeps each slot filled. The thread requests an actor from Ray, starts the training in the
actor, waits for the actor's death, and requests another actor.
"""

# A slot without room is a pending actor, which an autoscaler sees. The death of a worker, the loss of a node, growth
# and shrinkage take the same path: a slot becomes empty or is filled. The controller never blocks, and Ray sees none of
# these changes as a failure of the run.
import contextlib
import io
import pickle
import queue
import threading
import time
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train import Checkpoint
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.context import DistributedContext, get_train_context
from ray.train.v2._internal.execution.controller import controller
from ray.train.v2._internal.execution.controller.controller import TrainController
from ray.train.v2._internal.execution.scaling_policy import scaling_policy
from ray.train.v2._internal.execution.training_report import _TrainingReport
from ray.train.v2._internal.execution.worker_group.execution_group import ReplicaGroup
from ray.train.v2._internal.execution.worker_group.state import WorkerGroupState
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker, Worker, WorkerStatus
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup
from ray.train.v2._internal.util import ObjectRefWrapper, bundle_to_remote_args, invoke_context_managers, time_monotonic
from ray.train.v2.api import data_parallel_trainer

from steadfast.backoff import delays
from steadfast.errors import UsageError
from steadfast.guards.failures import FailureKind
from steadfast.orchestration.internals.starting import await_start, failure_to_start, node_of
from steadfast.orchestration.messages import FailureReport, Leave, Member
from steadfast.orchestration.policies import Quarantine
from steadfast.run.events import Notice
from steadfast.run.interrupts import outlive_sigterm
from steadfast.units import node_name

_STEADY_S = 10.0  # a worker that lived longer is replaced at once
_FIRST_DELAY_S = 0.5  # pause before a worker that died earlier is replaced; the pause grows with each early death
_LONGEST_DELAY_S = 5.0
_SHUTDOWN_S = 5.0
_OTHERS_S = 5.0  # time for workers of other GPUs to start, after one that cannot use its own
_ASK_S = 10.0
_MOST_PENDING = 8  # slots that may wait for room at the same time; more if more than this are filled


def coordinator_name(run_config: Any) -> str:
    """Return the actor name with which the controller finds a run's coordinator."""
    # Ray starts the controller, so the driver cannot pass the coordinator's handle to the controller.
    return f"coordinator of {run_config.storage_path}/{run_config.name}"


class SlotWorker(RayTrainWorker):
    """Actor of a worker, with a call that fails when the actor dies."""

    def __init__(self) -> None:
        super().__init__()
        outlive_sigterm()

    @ray.method(concurrency_group="watch")  # type: ignore[untyped-decorator]
    def park(self) -> None:
        """Block for ever, so that this call fails when the actor dies.

        The thread that keeps the slot waits for that failure.
        """
        threading.Event().wait()


@dataclass
class _Slot:
    """Place for one worker. A dead worker's actor is replaced."""

    index: int
    actor: Any = None
    worker: Worker | None = None  # None while no worker trains in the slot
    poll: Any = None  # pending call for the worker's status
    released: bool = False  # whether the worker left because the coordinator released it
    failure: FailureReport | None = None  # why the worker cannot join
    closed: threading.Event = field(default_factory=threading.Event)

    def close(self) -> None:
        self.closed.set()
        if self.actor is not None:
            ray.kill(self.actor)


class NoBarrier:
    """Stands for Ray's actor at which workers wait, which would take two seconds of CPU."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by pickle
            raise AttributeError(name)
        raise UsageError(
            "ray.train.report waits for a constant number of workers, which a run does not have. Return metrics in "
            "Sums, or call run.log in a hook; checkpoints are written by themselves"
        )


class SlotGroupState(WorkerGroupState):
    """State of a group whose slots end their own workers."""

    def shutdown(self) -> None:
        pass


class SlotWorkerGroup(WorkerGroup):
    """Worker group that keeps the wanted number of slots filled.

    To Ray the group looks like one that never changes.
    """

    _worker_cls = SlotWorker

    def _start_impl(self, worker_group_state_builder: Any) -> None:
        self._coordinator = ray.get_actor(coordinator_name(self._train_run_context.run_config))
        self._target = self._coordinator.num_slots.remote()  # pending call for the wanted number of slots
        self._over = False
        self._quarantine = Quarantine()
        self._slots: list[_Slot] = []
        # Each slot is a replica group of its own, because its worker is replaced alone.
        self._worker_rank_to_replica_group_rank = {rank: rank for rank in range(len(self))}
        with invoke_context_managers([each.on_worker_group_start for each in self._callbacks]):
            for callback in self._callbacks:
                callback.before_worker_group_start(self._worker_group_context)
            # There is no placement group: Ray would place all of its bundles together, and lose them together.
            none = SimpleNamespace(placement_group=None)
            self._worker_group_state = SlotGroupState(time_monotonic(), none, [], NoBarrier())
            for callback in self._callbacks:
                callback.after_worker_group_start(self)  # no worker runs yet; slots fill when there is room
            self._open(len(self))
        for callback in self._callbacks:
            callback.after_worker_group_training_start(self)

    def __len__(self) -> int:
        # Ray expects a constant number of workers here. The number of slots may differ.
        return int(self._worker_group_context.num_workers)

    def get_workers(self) -> list[Worker]:
        return [slot.worker for slot in self._slots if slot.worker]

    def _open(self, count: int) -> None:
        # Only empty slots are closed here, because the coordinator itself commands workers to leave.
        opened = [slot for slot in self._slots if not slot.closed.is_set()]
        filled = sum(slot.worker is not None for slot in opened)
        # Each empty slot costs a pending actor and a thread, so only some are opened. More follow as these fill.
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
        pauses = delays(_FIRST_DELAY_S, _LONGEST_DELAY_S)
        while not slot.closed.is_set():
            began_s = time.monotonic()
            member = Member("", None, "")
            slot.failure = None
            slot.actor = self._actor_class().remote()
            if slot.closed.is_set():  # the slot was closed before there was an actor to kill
                ray.kill(slot.actor)
            try:
                metadata = await_start(slot.actor)  # blocks this thread until there is room
                began_s = time.monotonic()
                member = Member("", None, metadata.node_id, pid=metadata.pid, host=metadata.hostname)
                self._fill(slot, metadata)
                ray.get(slot.actor.park.remote())
            except RayError as error:
                slot.failure = slot.failure or failure_to_start(error)
                member = replace(member, node=member.node or node_of(slot.actor))
            slot.worker = None
            slot.poll = None
            ray.kill(slot.actor)

            lived_s = time.monotonic() - began_s
            if slot.failure and not slot.released and not slot.closed.is_set():
                self._record_death(member, slot.failure, lived_s)
            # A worker that dies early is likely to die again, so its replacement is delayed.
            if slot.released or lived_s > _STEADY_S:
                slot.released = False
                pauses = delays(_FIRST_DELAY_S, _LONGEST_DELAY_S)
            else:
                slot.closed.wait(next(pauses))

    def _record_death(self, member: Member, failure: FailureReport, lived_s: float) -> None:
        node = member.node
        now_s = time.monotonic()
        computed_wrongly = False
        workers = self.get_workers()
        without_gpu = failure.kind is FailureKind.DEVICE
        if without_gpu and not workers:
            time.sleep(_OTHERS_S)
            workers = self.get_workers()
        elsewhere = any(worker.metadata.node_id != node for worker in workers)
        needs = set(self._worker_group_context.resources_per_worker)
        # The call is made before the next worker is placed, because that worker must avoid the node. Only this slot's
        # thread waits for the answer.
        with contextlib.suppress(RayError):
            asked = self._coordinator.ended.remote(member, failure, needs, not workers)
            computed_wrongly = ray.get(asked, timeout=_ASK_S)
        if not node:  # the worker has found no place
            return
        if computed_wrongly or without_gpu:
            # A worker without its GPU cannot train, so nothing is lost if there is no other node.
            avoided = self._quarantine.avoid(node, now_s, elsewhere or without_gpu)
        else:
            avoided = self._quarantine.record_death(node, lived_s, now_s, elsewhere)
        if avoided:
            why = "its workers died early, computed wrongly or could not use their GPU"
            text = f"node {node_name(node)} gets no new workers for a while: {why}"
            self._coordinator.publish.remote(Notice(event="node_quarantined", text=text, node=node))

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
        # These ranks number the slots, because Ray expects constant ranks. The coordinator assigns the ranks of worlds.
        worker.distributed_context = DistributedContext(
            local_rank=0, local_world_size=1, world_rank=slot.index, world_size=len(self), node_rank=0
        )
        self._init_train_context([worker], self._worker_group_state.sync_actor)
        group = ReplicaGroup([worker], context.resources_per_worker, self._replica_group_callbacks)
        group.start_training(context)
        slot.worker = worker

    def _poll_workers_and_collect_errors(self, timeout: float | None) -> list[WorkerStatus]:
        self._follow_target()
        asked: dict[Any, _Slot] = {}  # pending call -> its slot
        for slot in self._slots:
            if slot.worker:
                # The call is kept in a local variable, because the slot's thread may reset `slot.poll` at any moment.
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
                with contextlib.suppress(RayError):  # the slot's thread handles the death of its actor
                    status = ray.get(question)
            statuses.append(status)
            if isinstance(status.return_value, FailureReport):
                slot.failure = status.return_value
                status.return_value = None
                status.running = True  # another worker takes the slot
                ray.kill(slot.actor)
            elif status.return_value == Leave.RELEASED:
                slot.released = True
                ray.kill(slot.actor)
        return self._as_one(statuses)

    def _as_one(self, statuses: list[WorkerStatus]) -> list[WorkerStatus]:
        # Ray expects one status for each worker that it counts. The first status stands for all workers.
        first = WorkerStatus(running=False)
        for status in statuses:
            first.running = first.running or status.running
            first.error = first.error or status.error
            first.training_report = first.training_report or status.training_report
            if status.return_value != Leave.RELEASED:
                first.return_value = first.return_value or status.return_value
        # The run ends when one worker has returned because the run ended, and no worker is running. Until then empty
        # slots may fill.
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
            slot.closed.set()  # the slot's thread requests no other actor
        if goodbyes:
            ray.wait(goodbyes, num_returns=len(goodbyes), timeout=_SHUTDOWN_S)
        for slot in self._slots:
            slot.close()


class LastCommit(CheckpointManager):
    """Ray's list of checkpoints, which contains only the newest one.

    The run itself deletes older checkpoints, and Ray refuses to read a list that contains a deleted checkpoint.
    """

    def register_checkpoint(self, training_report: _TrainingReport) -> None:
        self._checkpoint_results.clear()
        self._checkpoint_to_report_index.clear()
        super().register_checkpoint(training_report)


class SlotController(TrainController):
    """Ray Train's controller with a worker group of slots."""

    worker_group_cls = SlotWorkerGroup

    def __init__(self, *arguments: Any, **named: Any) -> None:
        # The controller runs in its own process, and looks up the class of its checkpoint list under this name.
        controller.CheckpointManager = LastCommit
        super().__init__(*arguments, **named)


class NoRequests:
    """Stands for Ray's client of the actor that asks an autoscaler for nodes. An embedded Ray has no autoscaler."""

    def __init__(self, requester_id: str) -> None:
        pass

    def _ask_nobody(self, *_: Any) -> None:
        pass

    send_resource_request = maybe_send_resource_request = cancel_resource_request = _ask_nobody


class EmbeddedSlotController(SlotController):
    """Controller of an embedded Ray."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        scaling_policy.TrainAutoscalingCoordinatorClient = NoRequests
        super().__init__(*arguments, **named)


class InlineFunction:
    """Training function that does not use Ray's object store.

    The function is sent with each call. When an agent of an embedded Ray dies, the raylet leaves the cluster and ends.
    Ray's client then tries to restore each object that this process has put into the store, finds no store, and ends
    the process. So the command must not put any object into the store. A program that calls `fit` has to, if its
    objects are large.
    """

    def __init__(self, stored: ObjectRefWrapper[Any]) -> None:
        buffer = io.BytesIO()
        pickler = _Pickler(buffer)
        pickler.dump(stored.get())
        self._pickled = buffer.getvalue()
        self._references = pickler.references
        stored._ref = None  # this was the last reference, so the store deletes the function

    def get(self) -> Any:
        return _Unpickler(self._pickled, self._references).load()


class _Unpickler(pickle.Unpickler):
    """Unpickler that puts in the references which `_Pickler` has left out."""

    # A method of the class, because Python 3.13.0 does not let the attribute of an instance be set.
    def __init__(self, pickled: bytes, references: list[ray.ObjectRef]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._references = references

    def persistent_load(self, index: int) -> ray.ObjectRef:
        return self._references[index]


class _Pickler(ray.cloudpickle.Pickler):
    """Pickler that leaves references to objects in Ray's store out, for Ray to count."""

    # Ray would keep the object of a reference inside of other bytes until this process ends.
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.references: list[ray.ObjectRef] = []

    def persistent_id(self, value: object) -> int | None:
        if not isinstance(value, ray.ObjectRef):
            return None
        self.references.append(value)
        return len(self.references) - 1


@contextlib.contextmanager
def slot_controller(embedded: bool) -> Any:
    """Make trainers in this context use a controller with slots."""
    # TorchTrainer has no argument for the controller's class, so the class is replaced in Ray's module.
    stock = data_parallel_trainer.TrainController
    data_parallel_trainer.TrainController = EmbeddedSlotController if embedded else SlotController
    try:
        yield
    finally:
        data_parallel_trainer.TrainController = stock


def report(path: str, metrics: dict[str, Any]) -> None:
    """Report a checkpoint to the controller without a barrier.

    `ray.train.report` would wait for all ranks.
    """
    reported = _TrainingReport(checkpoint=Checkpoint(path), metrics=metrics, validation=False)
    reports = get_train_context().get_result_queue()
    # The queue holds one report. The new report replaces a report that the controller has not read yet.
    with contextlib.suppress(queue.Empty):
        reports.get_nowait()
    with contextlib.suppress(queue.Full):
        reports.put_nowait(reported)
