"""`recovery.mode=restart`: when a worker is lost, Ray Train ends all others and starts as many anew."""

# It needs Ray's public API only, so it is there for a release of Ray that has moved what slots build on.
import threading

import ray
import ray.train

from app.orchestration.coordinator import Coordinator
from app.orchestration.messages import FailureReport, Leave, Member, WorldAssignment
from app.orchestration.worker_runtime import RayRuntime
from app.run.events import Checkpoint, Event

_REGISTER_S = 10.0  # how long the end of a run waits for Ray's book-keeping


class RestartCoordinator(Coordinator):
    """Leave it to Ray how many workers there are, when they come and go, and how often they may die."""

    async def join_group(self, member: Member, size: int) -> WorldAssignment | Leave:
        """Return a place in a world of exactly the `size` that Ray has started."""
        await self._taken_over(member.name)
        self.membership.rescale(size, size)
        self.membership.expected = size
        # Also to one whose heartbeats have ended: it has to come and fail, so that Ray starts all workers again.
        return await self._assign(member)

    async def failed(self, member: str, report: FailureReport) -> bool:
        await self._taken_over(member)
        return self._judge(member, await self._second_thought(report))

    async def _watch(self) -> None:
        await self._taken_over()  # and no supervisor: Ray watches its workers

    async def _charge_loss(self, kind: str, attempt: int) -> None:
        pass  # Ray counts how often it has restarted the workers


class RestartRuntime(RayRuntime):
    """Take part in one world, that of the worker group which Ray has started."""

    outlives_peers = False
    _commit: Checkpoint | None = None  # the last one

    def publish(self, event: Event) -> None:
        self._coordinator.publish.remote(event.stamped())
        if isinstance(event, Checkpoint):
            self._commit = event

    def failed(self, step: int, error: BaseException) -> bool:
        """Report why the attempt broke after `step`, and raise `error`, by which Ray starts all workers again.

        Returns False if the run is over because of another worker.
        """
        kind, over = self._report(step, error)
        super().close()
        if not over or kind != "peer":
            raise error
        return False

    def close(self) -> None:
        # A report is a barrier of all ranks, and one that has died since would never come.
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
        # By this the last commit is `Result.checkpoint`. Nothing reads it back, so Ray is not told before the end.
        metrics: dict[str, int] = {}
        checkpoint = None
        if self._commit is not None:  # on the leader
            metrics["step"] = self._commit.step
            checkpoint = ray.train.Checkpoint(self._commit.path)
        upload = ray.train.CheckpointUploadMode.NO_UPLOAD
        ray.train.report(metrics, checkpoint=checkpoint, checkpoint_upload_mode=upload)
