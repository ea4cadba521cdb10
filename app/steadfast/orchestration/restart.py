"""`recovery.mode=restart`: after the loss of a worker, Ray Train restarts all workers."""

# This mode needs only Ray's public API. So it works with a version of Ray whose internals slots do not support.
import threading

import ray
import ray.train

from steadfast.guards.failures import FailureKind
from steadfast.orchestration.coordinator import Coordinator
from steadfast.orchestration.messages import FailureReport, Leave, Member, WorldAssignment
from steadfast.orchestration.worker_runtime import RayRuntime
from steadfast.run.events import Checkpoint, Event

_REGISTER_S = 10.0  # time that the end of a run waits for Ray to register the last checkpoint


class RestartCoordinator(Coordinator):
    """Coordinator that leaves the number of workers and their restarts to Ray."""

    async def join_group(self, member: Member, size: int) -> WorldAssignment | Leave:
        """Return the worker's place in a world of `size` workers.

        Ray has started a group of that size.
        """
        await self._taken_over(member.name)
        self.membership.rescale(size, size)
        self.membership.expected = size
        # A worker whose heartbeats have ended gets a place too. It must enter the world and fail there, so that Ray
        # restarts all workers.
        return await self._assign(member)

    async def failed(self, member: str, report: FailureReport) -> bool:
        await self._taken_over(member)
        return self._judge(member, await self._confirm_cause(report))

    async def _watch(self) -> None:
        await self._taken_over()  # there are no checks, because Ray watches its workers

    async def _charge_loss(self, kind: FailureKind, attempt: int) -> None:
        pass  # Ray itself counts the restarts of workers


class RestartRuntime(RayRuntime):
    """Runtime of a worker that takes part in one world.

    The members of the world are the workers of Ray's worker group.
    """

    outlives_peers = False
    _commit: Checkpoint | None = None  # last checkpoint that this worker has committed

    def publish(self, event: Event) -> None:
        self._coordinator.publish.remote(event.stamped())
        if isinstance(event, Checkpoint):
            self._commit = event

    def failed(self, step: int, error: BaseException) -> bool:
        """Report why the attempt broke after `step`, and raise `error`.

        The error makes Ray restart all workers. If another worker has ended the run, return False instead.
        """
        kind, over = self._report(step, error)
        super().close()
        if not over or kind is not FailureKind.PEER:
            raise error
        return False

    def close(self) -> None:
        # Ray's report is a barrier of all ranks, at which a dead rank never arrives. So the wait has a limit.
        if self._world is not None:
            registering = threading.Thread(target=self._register, daemon=True, name="register")
            registering.start()
            registering.join(_REGISTER_S)
        super().close()

    def _ask(self, member: Member) -> WorldAssignment | Leave:
        size = ray.train.get_context().get_world_size()
        answer: WorldAssignment | Leave = ray.get(self._coordinator.join_group.remote(member, size))
        return answer

    def _register(self) -> None:
        # The report makes the last checkpoint available as `Result.checkpoint`. The run itself does not read it, so one
        # report at the end is enough.
        metrics: dict[str, int] = {}
        checkpoint = None
        if self._commit is not None:  # only on the leader
            metrics["step"] = self._commit.step
            checkpoint = ray.train.Checkpoint(self._commit.path)
        upload = ray.train.CheckpointUploadMode.NO_UPLOAD
        ray.train.report(metrics, checkpoint=checkpoint, checkpoint_upload_mode=upload)
