"""The coordinator: one actor that gathers workers into worlds, commands them and writes the run's events."""

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from dataclasses import asdict, replace
from typing import Any

import ray

from app.config import RecoveryConfig, ScalingConfig
from app.errors import RunConflict
from app.orchestration.gauges import Gauges
from app.orchestration.heartbeat import Commands, HeartbeatServer
from app.orchestration.journal import Journal
from app.orchestration.membership import Form, Keep, Membership, Resize, Short, Wait
from app.orchestration.messages import FailureReport, Leave, Member, WorldAssignment
from app.orchestration.policies import BrokenWorlds, Budgets
from app.orchestration.succession import Succession
from app.orchestration.supervisor import Supervisor
from app.run import events
from app.run.directory import RunDirectory
from app.run.events import Event
from app.run.owner import Ownership
from app.world.timeouts import Timeouts

_SETTLE_S = 5.0  # how long the first world waits for the rest of the workers that have room
_GATHER_S = 0.3  # how long a newcomer waits for others
_STORAGE_S = 1.0  # how long after storage has refused it is asked again
_DEATH_NEWS_S = 0.5  # for the news of a death to arrive, before an exception counts as the user's
_NEVER_CAME = "not heard of since the coordinator has died"

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
    # on one event loop, so nothing here needs a lock. Storage is asked in threads: heartbeats must not wait for it.
    #
    # Its state is soft. Ray starts another one when it dies, and repeats the calls that were under way. What that one
    # must know stands in `owner.json` and `events.jsonl`, and the workers bring the rest, see `rejoin`.
    def __init__(
        self,
        recovery: RecoveryConfig,
        scaling: ScalingConfig,
        directory: RunDirectory,
        ownership: Ownership,
        expected: int,
        unit: int = 1,
    ) -> None:
        self.over = False
        self.short_since_s: float | None = None  # since when there are too few workers for a world
        self.members: dict[str, Member] = {}
        self.membership = Membership(*scaling.num_workers, expected, _SETTLE_S, _GATHER_S, scaling.spares, unit)
        self._left_over = 0  # workers that wait, as far as it has been told
        self._supervisor = Supervisor(self, directory, ownership, recovery)
        self._timeouts = Timeouts(recovery.silence_s)
        self.heartbeats = HeartbeatServer(self._timeouts, self._supervisor.heard, self.lose, self._supervisor.patience)
        self._started: asyncio.Task[int] | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # by which they are kept from being collected

        self._directory = directory
        self._ownership = ownership
        self._journal = Journal(directory)
        self._gauges = Gauges(directory.name)
        counted = ("worker", "hang", "exception", "oom", "communication", "corruption")
        self._budgets = Budgets(dict.fromkeys(counted, recovery.max_failures))
        self._broken_worlds = BrokenWorlds()
        self._seen_failures: dict[tuple[int, str], str | None] = {}  # step and message -> who had it first
        self._furthest_step = 0  # in the ledger, as far as it has been looked at
        # Members taken for dead -> the cause, until an event has told it. One behind a partition may come back.
        self._dead: dict[str, str] = {}
        # Members without a world, whose call waits for the answer.
        self._waiting: dict[str, asyncio.Future[Answer]] = {}
        self._running = 0  # the attempt under way, 0 between two
        # Set once it is known why the attempt under way must end: what its members raise then is a consequence.
        self._doomed = asyncio.Event()
        # All who were dead when a member noticed it are known by then: their heartbeats have been missing for so long.
        self._all_deaths_known_s = recovery.silence_s + _DEATH_NEWS_S
        self._corrupted_nodes: set[str] = set()  # on which a worker has computed wrongly
        self._amendments = directory.amendments()
        self._succession = self._succeed()
        self._ownership.renew_in_background()  # the command that has claimed the run does so no more

    # Calls of workers.

    async def heartbeat_port(self) -> int:
        """Return the port for heartbeats. The first call opens it."""
        if self._started is None:
            self._started = asyncio.ensure_future(self._start())
        return await self._started

    async def _start(self) -> int:
        self._spawn(self._watch())
        return await self.heartbeats.listen(ray.util.get_node_ip_address())

    async def admit(self, name: str) -> str:
        """Let the heartbeats of a worker in. Return the secret that it must know for them."""
        return self.heartbeats.admit(name)

    async def _watch(self) -> None:
        await self._taken_over()
        await self._supervisor.watch()

    async def rejoin(self, member: Member, place: WorldAssignment | None, commands: Commands) -> bool:
        """Take a worker over from the coordinator that has died. Return False if the others go on without it.

        Args:
            place: its last one.
            commands: what it has been told last.
        """
        if member.name in self._dead:
            return False
        if self._succession.over:
            return place is None or member.name in self.members
        if place is not None:
            self.members[member.name] = member
            self._succession.came(member.name, place)
        self.heartbeats.command(**merged(commands, self.heartbeats.commands))
        return True

    async def join(self, member: Member) -> Answer:
        """Return a place in the next world, once it forms. The worker's heartbeats have begun."""
        await self._taken_over(member.name)
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
        await self._taken_over(name)
        if self._forget(name):
            self._doomed.set()
            self.reconcile()

    async def failed(self, member: str, report: FailureReport) -> bool:
        """Record why an attempt broke. Return whether the run is over."""
        await self._taken_over(member)
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
            await self._look_at_ledger()
            # Of those who wait, the first ends the attempt, so that it is charged once.
            if report.attempt == self._running and not self._doomed.is_set():
                return replace(report, kind="communication")
        return report

    def _judge(self, member: str, report: FailureReport) -> bool:
        if member in self._dead:  # the others have gone on without it
            return self.over
        self._amendments = self._amendments.leaving_out(report.skip)
        cause = "exception"
        if report.kind == "peer":
            cause = "worker lost"
        elif report.kind == "numeric":
            cause = report.message
        elif report.kind == "communication":
            cause = "communication failed"
            self._charge_communication(member, report)
        elif report.kind == "corruption":
            cause = "corruption"
            self._expel(report.corrupted, report.step)
        elif report.forward_size is not None:
            cause = "out of memory"
            self._shrink(report, report.forward_size)
        else:
            self._charge(member, report)
        self._end_attempt(cause, report)
        return self.over

    def _charge(self, member: str, report: FailureReport) -> None:
        exceeded = self._budgets.spend(report.kind, report.step)
        # An exception that comes back at its step would do so for ever. Ours tell the user what to change. A worker
        # that has had one trains no more: from the same worker, it is the same call again.
        first = self._seen_failures.setdefault((report.step, report.message), member)
        if report.kind == "ours" or first != member or exceeded is not None:
            self.over = True
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

    def _shrink(self, report: FailureReport, forward_size: int) -> None:
        # Every rank may have run out, in forwards of another size each.
        if self._amendments.forward_size is None or forward_size < self._amendments.forward_size:
            self.record(events.ForwardsShrunk(step=report.step + 1, forward_size=forward_size, error=report.message))

    def _expel(self, name: str, step: int) -> None:
        # All members report it, and the first one counts.
        if name in self.members and name not in self._dead:
            self.lose(name, f"computed wrongly in step {step + 1}", "corruption")

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
        exceeded = self._budgets.spend(report.kind, self._furthest_step)
        if reason := broken or exceeded:
            why = f"workers cannot communicate, though none was lost: {reason}\n{report.message}\n{_REMEDY}"
            self.give_up(why, report.kind, exceeded)

    async def publish(self, event: Event) -> None:
        """Record an event of a worker or a slot."""
        # Not of an attempt that others have succeeded: the leader that tells it has been cut off from them.
        if event.attempt in (None, self._ownership.attempt) and not self._journal.has(event):
            await self.record(event)

    # Calls of slots and of the driver.

    async def num_slots(self) -> int:
        """Return how many slots are to be open; 0 if the run needs no worker any more."""
        await self._taken_over()
        return 0 if self.over or self._nothing_to_save() else self.membership.wanted

    async def corrupted_nodes(self) -> list[str]:
        """Return the nodes on which a worker has computed wrongly."""
        return sorted(self._corrupted_nodes)

    async def events(self, first: int, stop: bool) -> list[Event]:
        """Return the kept events of this command from number `first` on, and those since the last call that are not.

        Args:
            stop: whether the run is to end, resumable, as soon as what the workers hold is on storage.
        """
        # Told in each call, because a coordinator that has been told may die.
        if stop and not self.heartbeats.commands.stop:
            self.heartbeats.command(stop=True)
            self._close_if_stopping()
        return self._journal.since(first)

    async def close(self) -> None:
        """Return once all events are on storage. Nothing is recorded after it."""
        self._supervisor.close()
        await self._journal.close()

    def _close_if_stopping(self) -> None:
        if self.heartbeats.commands.stop and self._succession.over:
            self.dismiss(self.membership.close(), Leave.RUN_ENDED)

    # From one coordinator to the next.

    def _succeed(self) -> Succession:
        """Learn from storage what the last coordinator of this command knew, if there was one."""
        for event in self._journal.former:
            self._furthest_step = max(self._furthest_step, getattr(event, "step", None) or 0)
            self._learn(event)
        claimed = self._ownership.attempt
        unknown = False
        try:
            self._ownership.renew()
        except RunConflict:
            pass  # the next attempt says so
        except OSError:
            unknown = True
        begun = unknown or self._ownership.attempt > claimed
        return Succession(self._timeouts, expected=begun and not self.over)

    def _learn(self, event: Event) -> None:
        self._supervisor.observe(event)
        match event:
            case events.Scale(after=bounds):
                self.membership.rescale(*bounds)
            case events.AttemptStarted(attempt=int(attempt)):
                self._broken_worlds.stepped(attempt)
            case events.AttemptEnded(attempt=int(attempt), cause="communication failed"):
                self._broken_worlds.count(attempt)
            case events.Failure(kind=str(kind), member=member):
                self.over = self.over or event.fatal
                self._note_corrupted(event)
                self._budgets.spend(kind, self._furthest_step, event.attempt)
                if event.step is not None:
                    self._seen_failures.setdefault((event.step, event.error), member)
            case events.Finished():
                self.over = True

    async def _taken_over(self, name: str | None = None) -> None:
        """Return once it is known who of the world lives. Member `name` does not train until then."""
        if self._succession.over:
            return
        await self.heartbeat_port()  # without it nobody can come
        if await self._succession.wait(name):
            self._take_over(self._succession)

    def _take_over(self, former: Succession) -> None:
        place = former.newest
        names = place.members if place else ()
        self.membership.begin(names)
        self.heartbeats.expect(names)
        if place is not None:
            self._amendments = self._amendments.leaving_out(place.amendments.skip)
            ended = [event.attempt for event in self._journal.former if isinstance(event, events.AttemptEnded)]
            # Not if another one has begun meanwhile: then none of its members has been told.
            if place.attempt >= self._ownership.attempt and place.attempt not in ended:
                self._running = place.attempt
        missing = [name for name in names if name not in self.members]
        follows = f"another one has taken its place, and {len(names) - len(missing)} of {len(names)} workers go on"
        self.record(events.ProcessRestarted(process="the coordinator", follows=follows))
        for name in missing:
            self._lose_from_world(Member(name, None, ""), "worker", self._dead.get(name) or _NEVER_CAME)
        # One of an earlier world that does not wait for another has been cut off from those who made this one.
        for name in former.behind():
            self.lose(name, _NEVER_CAME)
        if former.broken():
            self.abort()
        self._close_if_stopping()
        self.reconcile()

    # From one world to the next.

    def reconcile(self) -> None:
        """Do what the membership decides now."""
        if self.over or not self._succession.over or self._nothing_to_save():
            return
        decision = self.membership.decide(time.monotonic())
        if not isinstance(decision, Short):
            self.short_since_s = None
        match decision:
            case Form(members):
                self._spawn(self._form(members))
            case Resize(none_stays) if self._running:
                self._doomed.set()
                self.heartbeats.command(leave=self._running, save=self._running if none_stays else 0)
            case Wait(seconds):
                asyncio.get_running_loop().call_later(seconds, self.reconcile)
            case Keep():
                self._tell_of_left_over()
            case Short():
                self.short_since_s = self.short_since_s or time.monotonic()

    def _tell_of_left_over(self) -> None:
        left_over = self.membership.left_over
        if left_over != self._left_over:
            self._left_over = left_over
            if left_over:
                self.record(events.LeftOver(workers=left_over, unit=self.membership.unit))

    def _nothing_to_save(self) -> bool:
        # Only who has been in a world may hold more than storage does.
        return self.heartbeats.commands.stop and not self.membership.world

    async def _form(self, names: tuple[str, ...]) -> None:
        self._end_attempt("all workers lost")
        attempt = await self._next_attempt()
        if attempt is None or self.over:
            return
        if names != self.membership.world:  # a member has been lost while storage did not answer
            for name in self.membership.world:
                self.membership.join(name, time.monotonic(), self.members[name].node)
            self.reconcile()
            return
        self._running = attempt
        self._doomed = asyncio.Event()
        self.heartbeats.expect(names)
        store = self.members[names[0]].store
        for rank, name in enumerate(names):
            place = WorldAssignment(rank, len(names), attempt, store, self._amendments, names)
            self._waiting.pop(name).set_result(place)
        self.reconcile()  # somebody may have come meanwhile

    async def _next_attempt(self) -> int | None:
        # Storage counts the attempts, by which it refuses commits of a former one. Without a number there is no world.
        told = False
        while not self.over:
            try:
                return await asyncio.to_thread(self._ownership.next_attempt)
            except OSError as error:
                if not told:
                    self.record(events.WaitingForStorage(error=str(error)))
                    told = True
                await asyncio.sleep(_STORAGE_S)
            except RunConflict as error:
                self.give_up(str(error))
        return None

    def lose(self, name: str, cause: str, kind: str = "worker") -> None:
        """Take a worker for dead. The world that it was in is told at once; whoever lives joins the next one."""
        member = self.members.get(name)
        self._dead[name] = "" if member else cause
        if member is None:
            return
        # One that is only silent would wake up in a world that has gone on.
        ray.kill(member.actor)
        if not self._succession.over:
            self._dead[name] = cause
            self.members.pop(name)  # who the world is will be known soon
            return
        self._lose_from_world(member, "preemption" if member.node in self._supervisor.draining else kind, cause)
        self.reconcile()

    def _lose_from_world(self, member: Member, kind: str, cause: str) -> None:
        self._dead[member.name] = ""
        if self._forget(member.name):
            self.abort()
            self._record_failure(member, kind, cause)

    def _record_failure(self, member: Member, kind: str, cause: str) -> None:
        # A loss between two attempts counts as one of the former.
        attempt = self._ownership.attempt
        node = member.node or None
        self.record(events.Failure(attempt=attempt, kind=kind, member=member.name, node=node, error=cause))
        self._spawn(self._charge_loss(kind, attempt))

    async def _charge_loss(self, kind: str, attempt: int) -> None:
        await self._look_at_ledger()
        if exceeded := self._budgets.spend(kind, self._furthest_step, attempt):
            self.give_up(exceeded, kind, exceeded)

    async def _look_at_ledger(self) -> None:
        with contextlib.suppress(OSError):  # what was known before will do
            line = await asyncio.to_thread(self._directory.last_step_line)
            self._furthest_step = int(line.get("step", 0))

    def abort(self) -> None:
        """Tell the members of the world under way that it is no more."""
        self._doomed.set()
        self.heartbeats.command(aborted=self._ownership.attempt)

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

    def _note_corrupted(self, event: Event) -> None:
        match event:
            case events.Failure(kind="corruption", node=str(node)):
                self._corrupted_nodes.add(node)

    def record(self, event: Event) -> asyncio.Future[None]:
        """Draw the consequences of an event, and write it down; the result is there once it is on storage."""
        match event:
            case events.Rollback(steps=steps):
                self._amendments = self._amendments.leaving_out(steps)
            case events.AttemptStarted(attempt=int(attempt)):
                self._broken_worlds.stepped(attempt)
            case events.ForwardsShrunk(forward_size=size):
                self._amendments = replace(self._amendments, forward_size=size)
            case events.AttemptEnded():
                self._running = 0
                self._doomed.set()
            case events.Failure():
                self._note_corrupted(event)
            case events.Finished():
                self.over = True
                self.dismiss(list(self._waiting), Leave.RUN_ENDED)
        self._supervisor.observe(event)
        self._gauges.observe(event)
        return self._journal.write(event)

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

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def merged(commands: Commands, others: Commands) -> dict[str, Any]:
    """Return the newest of each command. A stop holds, and attempts are counted on."""
    newest = asdict(others)
    for name, value in asdict(commands).items():
        newest[name] = max(value, newest[name])
    return newest
