"""The coordinator: one actor that gathers workers into worlds, commands them and writes the run's events."""

import asyncio
import time
from dataclasses import replace

import ray
import torch.distributed as dist

from app.config import RecoveryConfig
from app.errors import RunConflict
from app.orchestration.heartbeat import HeartbeatServer
from app.orchestration.membership import Form, Membership, Resize, Short, Wait
from app.orchestration.messages import FailureReport, Leave, Member, WorldAssignment
from app.orchestration.policies import BrokenWorlds, Budgets
from app.orchestration.supervisor import Supervisor
from app.run import events
from app.run.directory import RunDirectory
from app.run.events import Event
from app.run.owner import Ownership
from app.world.groups import serve_store
from app.world.timeouts import Timeouts

_SETTLE_S = 5.0  # how long the first world waits for the rest of the workers that have room
_GATHER_S = 0.3  # how long a newcomer waits for others
_STORAGE_S = 1.0  # how long after storage has refused it is asked again
_DEATH_NEWS_S = 0.5  # for the news of a death to arrive, before an exception counts as the user's

# What to do where workers live and cannot reach each other. Which of it is wrong cannot be known from here.
_REMEDY = (
    "Look for a network interface that does not exist or does not lead to the other workers (GLOO_SOCKET_IFNAME, "
    "NCCL_SOCKET_IFNAME), a firewall between nodes, two workers on one GPU, or nodes that differ in driver or NCCL. "
    "With NCCL_DEBUG=INFO, NCCL tells what it tries, and -v shows it. Workers have these variables from the command, "
    "else from ray start on their node. Then give the same command again"
)

Answer = WorldAssignment | Leave


class Coordinator:
    """Decide who is in the world and what a failure costs, and tell all who take part. An async actor."""

    # Workers, slots and the driver call its async methods, the supervisor what else has no underscore. All of it runs
    # on one event loop, so nothing here needs a lock.
    def __init__(
        self,
        recovery: RecoveryConfig,
        num_workers: tuple[int, int],
        directory: RunDirectory,
        ownership: Ownership,
        expected: int,
    ) -> None:
        self.over = False
        self.short_since_s: float | None = None  # since when there are too few workers for a world
        self.members: dict[str, Member] = {}
        self.membership = Membership(*num_workers, expected, _SETTLE_S, _GATHER_S)
        self._supervisor = Supervisor(self, directory, ownership, recovery)
        self.heartbeats = HeartbeatServer(
            Timeouts(recovery.silence_s), self._supervisor.heard, self.lose, self._supervisor.patience
        )
        self._port: asyncio.Future[int] | None = None

        self._directory = directory
        self._ownership = ownership
        self._ownership.renew_in_background()  # the command that has claimed the run does so no more
        self._events_file = directory.open_events()
        self._events: list[Event] = []
        counted = ("worker", "hang", "exception", "oom", "communication")
        self._budgets = Budgets(dict.fromkeys(counted, recovery.max_failures))
        self._broken_worlds = BrokenWorlds()
        self._seen_failures: set[tuple[int, str]] = set()
        # Members taken for dead -> the cause, until an event has told it. One behind a partition may come back.
        self._dead: dict[str, str] = {}
        # Members without a world, whose call waits for the answer.
        self._waiting: dict[str, asyncio.Future[Answer]] = {}
        self._running = 0  # the attempt under way, 0 between two
        # Set once it is known why the attempt under way must end: what its members raise then is a consequence.
        self._doomed = asyncio.Event()
        # All who were dead when a member noticed it are known by then: their heartbeats have been missing for so long.
        self._all_deaths_known_s = recovery.silence_s + _DEATH_NEWS_S
        self._store: dist.TCPStore | None = None  # of the newest world; it ends with this reference
        self._skip = directory.skipped_steps()

    # Calls of workers.

    async def heartbeat_port(self) -> int:
        """Return the port for heartbeats. The first call opens it."""
        if self._port is None:
            self._port = asyncio.ensure_future(self._start())
        return await self._port

    async def _start(self) -> int:
        self._watching = asyncio.ensure_future(self._supervisor.watch())
        return await self.heartbeats.listen(ray.util.get_node_ip_address())

    async def admit(self, name: str) -> str:
        """Let the heartbeats of a worker in. Return the secret that it must know for them."""
        return self.heartbeats.admit(name)

    async def join(self, member: Member) -> Answer:
        """Return a place in the next world, once it forms. The worker's heartbeats have begun."""
        if member.name not in self._dead:
            return await self._assign(member)
        # They may have ended before it came here for the first time; then nobody has told why.
        if cause := self._dead[member.name]:
            self._dead[member.name] = ""
            self._record_failure(member, "worker", cause)
        return Leave.RELEASED

    async def _assign(self, member: Member) -> Answer:
        if self.over or (self.heartbeats.commands.stop and member.name not in self.membership.world):
            return Leave.RUN_ENDED
        self.members[member.name] = member
        welcome = self.membership.join(member.name, time.monotonic(), member.node)
        if not welcome or member.node in self._supervisor.draining:
            self._forget(member.name)
            self.reconcile()
            return Leave.RELEASED
        waiting: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[member.name] = waiting
        self.reconcile()
        return await waiting

    async def leave(self, name: str) -> None:
        """Let a worker go: the end of its heartbeats is not a failure."""
        if self._forget(name):
            self._doomed.set()
            self.reconcile()

    async def failed(self, member: str, report: FailureReport) -> bool:
        """Record why an attempt broke. Return whether the run is over."""
        if report.kind == "exception":
            # A dying peer can make any call of a survivor raise, and its exception may be here before the death is.
            await asyncio.sleep(_DEATH_NEWS_S)
            if report.attempt and report.attempt == self.heartbeats.commands.aborted:
                report = replace(report, kind="peer")
        return self._judge(member, await self._second_thought(report))

    async def _second_thought(self, report: FailureReport) -> FailureReport:
        # "peer" is what a worker makes of an error's text. It is one if a member of the attempt has been lost; a wrong
        # interface raises the same, and would do so in world after world.
        if report.kind != "peer" or report.attempt != self._running:
            return report
        try:
            await asyncio.wait_for(self._doomed.wait(), self._all_deaths_known_s)
        except TimeoutError:
            # Of those who wait, the first ends the attempt, so that it is charged once.
            if report.attempt == self._running and not self._doomed.is_set():
                return replace(report, kind="communication")
        return report

    def _judge(self, member: str, report: FailureReport) -> bool:
        if member in self._dead:  # the others have gone on without it
            return self.over
        self._skip |= set(report.skip)
        cause = "exception"
        if report.kind == "peer":
            cause = "worker lost"
        elif report.kind == "numeric":
            cause = report.message
        elif report.kind == "communication":
            cause = "communication failed"
            self._charge_communication(member, report)
        else:
            self._charge(member, report)
        self._end_attempt(cause, report)
        return self.over

    def _charge(self, member: str, report: FailureReport) -> None:
        exceeded = self._budgets.spend(report.kind, report.step)
        # An exception that comes back at its step would do so for ever. Ours tell the user what to change.
        seen = (report.step, report.message)
        if report.kind == "ours" or seen in self._seen_failures or exceeded is not None:
            self.over = True
        self._seen_failures.add(seen)
        failure = events.Failure(
            kind=report.kind,
            member=member,
            step=report.step,
            error=report.message,
            traceback=report.traceback,
            fatal=self.over,
            budget=exceeded,
        )
        self.record(failure)

    def _charge_communication(self, member: str, report: FailureReport) -> None:
        failure = events.Failure(
            kind=report.kind,
            member=member,
            step=report.step,
            error=report.message,
            traceback=report.traceback,
        )
        self.record(failure)
        broken = self._broken_worlds.count(report.attempt)
        exceeded = self._budgets.spend(report.kind, self._last_step())
        if reason := broken or exceeded:
            why = f"workers cannot communicate, though none was lost: {reason}\n{report.message}\n{_REMEDY}"
            self.give_up(why, report.kind, exceeded)

    async def publish(self, event: Event) -> None:
        """Record an event of a worker or a slot."""
        # Not of an attempt that others have succeeded: the leader that tells it has been cut off from them.
        if event.attempt in (None, self._ownership.attempt):
            self.record(event)

    # Calls of slots and of the driver.

    async def num_slots(self) -> int:
        """Return how many slots are to be open; 0 if the run needs no worker any more."""
        return 0 if self.over or self._nothing_to_save() else self.membership.largest

    async def events(self, first: int) -> list[Event]:
        """Return the events from number `first` on."""
        return self._events[first:]

    async def request_stop(self) -> None:
        """End the run, resumable, as soon as what the workers hold is on storage."""
        self.heartbeats.command(stop=True)
        self.dismiss(self.membership.close(), Leave.RUN_ENDED)

    async def close(self) -> None:
        """Return once all events are on storage. Nothing is recorded after it."""
        await asyncio.to_thread(self._events_file.close)

    # From one world to the next.

    def reconcile(self) -> None:
        """Do what the membership decides now."""
        if self.over or self._nothing_to_save():
            return
        decision = self.membership.decide(time.monotonic())
        if not isinstance(decision, Short):
            self.short_since_s = None
        match decision:
            case Form(members):
                self._form(members)
            case Resize(none_stays) if self._running:
                self._doomed.set()
                self.heartbeats.command(leave=self._running, save=self._running if none_stays else 0)
            case Wait(seconds):
                asyncio.get_running_loop().call_later(seconds, self.reconcile)
            case Short():
                self.short_since_s = self.short_since_s or time.monotonic()

    def _nothing_to_save(self) -> bool:
        # Only who has been in a world may hold more than storage does.
        return self.heartbeats.commands.stop and not self.membership.world

    def _form(self, names: tuple[str, ...]) -> None:
        if names != self.membership.world:  # a member has been lost while storage did not answer
            return
        self._end_attempt("all workers lost")
        # Storage counts the attempts, by which it refuses commits of a former one. Without a number there is no world.
        try:
            self._running = attempt = self._ownership.next_attempt()
        except OSError as error:
            self.record(events.WaitingForStorage(error=str(error)))
            asyncio.get_running_loop().call_later(_STORAGE_S, self._form, names)
            return
        except RunConflict as error:
            self.give_up(str(error))
            return
        self._doomed = asyncio.Event()
        self.heartbeats.expect(names)
        self._store = serve_store(ray.util.get_node_ip_address())
        for rank, name in enumerate(names):
            place = WorldAssignment(rank, len(names), attempt, self._store.port, self._skip)
            self._waiting.pop(name).set_result(place)

    def lose(self, name: str, cause: str, kind: str = "worker") -> None:
        """Take a worker for dead. The world that it was in is told at once; whoever lives joins the next one."""
        member = self.members.get(name)
        self._dead[name] = "" if member else cause
        if member is None:
            return
        was_in = self._forget(name)
        ray.kill(member.actor)  # one that is only silent would wake up in a world that has gone on
        if was_in:
            self.abort()
            self._record_failure(member, "preemption" if member.node in self._supervisor.draining else kind, cause)
        self.reconcile()

    def _record_failure(self, member: Member, kind: str, cause: str) -> None:
        self.record(events.Failure(kind=kind, member=member.name, node=member.node, error=cause))
        self._charge_loss(kind)

    def _charge_loss(self, kind: str) -> None:
        if exceeded := self._budgets.spend(kind, self._last_step()):
            self.give_up(exceeded)

    def _last_step(self) -> int:
        return int(self._directory.last_step_line().get("step", 0))

    def abort(self) -> None:
        """Tell the members of the world under way that it is no more."""
        self._doomed.set()
        self.heartbeats.command(aborted=self._ownership.attempt)
        self._store = None  # which frees those who still form it

    def dismiss(self, names: list[str], reason: Leave) -> None:
        """Send workers away that wait for an assignment, and see what follows for the others."""
        for name in names:
            waiting = self._waiting.pop(name, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(reason)
        self.reconcile()

    def give_up(self, why: str, kind: str = "ours", budget: str | None = None) -> None:
        """End the run as failed. `budget` says which one has been exceeded."""
        self.over = True
        self.abort()
        self.record(events.Failure(kind=kind, fatal=True, error=why, traceback="", budget=budget))
        self.dismiss(list(self._waiting), Leave.RUN_ENDED)

    def record(self, event: Event) -> None:
        """Write an event down and draw the consequences."""
        match event:
            case events.Rollback(steps=steps):
                self._skip |= set(steps)
            case events.AttemptStarted(attempt=int(attempt)):
                self._broken_worlds.stepped(attempt)
            case events.AttemptEnded():
                self._running = 0
                self._doomed.set()
            case events.Finished():
                self.over = True
                self.dismiss(list(self._waiting), Leave.RUN_ENDED)
        self._supervisor.observe(event)
        event = event.stamped()
        self._events_file.write(event)
        self._events.append(event)

    def _end_attempt(self, cause: str, report: FailureReport | None = None) -> None:
        # Every survivor reports the same end, and the first one counts. A newcomer that fails before it is in a world
        # ends nothing.
        if self._running and (report is None or report.attempt == self._running):
            step = report.step if report else None
            self.record(events.AttemptEnded(attempt=self._running, cause=cause, step=step))

    def _forget(self, name: str) -> bool:
        # Returns whether the world under way counted on it.
        self.members.pop(name, None)
        if waiting := self._waiting.pop(name, None):
            waiting.cancel()
        return self.membership.lose(name)
