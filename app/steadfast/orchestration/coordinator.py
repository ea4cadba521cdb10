"""Coordinator of a run, a Ray actor that forms worlds of workers."""

import asyncio
import contextlib
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import asdict, replace
from typing import Any

import ray

from steadfast.config import RecoveryConfig
from steadfast.errors import RunConflict
from steadfast.guards.failures import FailureKind
from steadfast.liveness.lateness import Lateness
from steadfast.orchestration.cluster import startable
from steadfast.orchestration.gauges import Gauges
from steadfast.orchestration.heartbeat import Commands, HeartbeatServer, Message, Silence, answer_line
from steadfast.orchestration.internals import draining_nodes
from steadfast.orchestration.journal import Journal
from steadfast.orchestration.membership import Form, Keep, Membership, Resize, Short, Wait
from steadfast.orchestration.messages import FailureReport, Leave, Member, WorldAssignment
from steadfast.orchestration.policies import BrokenWorlds, Budgets
from steadfast.orchestration.stack_files import StackFiles
from steadfast.orchestration.succession import Succession
from steadfast.orchestration.supervisor import Abort, Decision, Dump, Lose, Record, Release, Situation, Supervisor
from steadfast.orchestration.workers_file import WorkersFile
from steadfast.run import events
from steadfast.run.directory import STACKS, KillRequest, RunDirectory, ScaleRequest
from steadfast.run.events import Event
from steadfast.run.owner import Ownership
from steadfast.units import node_name, plural
from steadfast.world.timeouts import Timeouts

_INTERVAL_S = 0.25  # time between two checks for what no call reports
_STORAGE_S = 1.0  # pause before the coordinator repeats a call that storage has refused
_DEATH_NEWS_S = 0.5  # time for a peer's death to be noticed, before an exception is blamed on the user's code
_NO_COMMUNICATION = "communication failed"  # cause of an attempt's end
_STARTS = "before joining"  # key of the budget for workers that fail before they join
_NEVER_CAME = "not heard of since the coordinator has died"

# Advice for workers that live and cannot reach each other. The coordinator cannot know which of the causes it is.
_REMEDY = (
    "Look for a network interface that does not exist or does not lead to the other workers (GLOO_SOCKET_IFNAME, "
    "NCCL_SOCKET_IFNAME), a firewall between nodes, two workers on one GPU, or nodes that differ in driver or NCCL. "
    "With NCCL_DEBUG=INFO, NCCL logs its connections, and -v shows the log. Workers get these variables from the "
    "command, or else from ray start on their node. Then give the same command again"
)

# Failures whose number in a row is limited.
_COUNTED = (
    FailureKind.WORKER,
    FailureKind.HANG,
    FailureKind.EXCEPTION,
    FailureKind.OUT_OF_MEMORY,
    FailureKind.COMMUNICATION,
    FailureKind.CORRUPTION,
)

Answer = WorldAssignment | Leave


class Coordinator:
    """Actor that forms worlds, judges failures and commands the workers.

    Responsibilities, in the order of the methods:
    - Give each worker a place in the next world (`ask`), as `Membership` decides.
    - Declare workers dead (`lose`), and abort the world that contained them.
    - Check what no call reports, and carry out the decisions of `Supervisor`.
    - Decide from each failure report whether the run goes on (`failed`).
    - Record the events of the run (`publish`), and hand them to the driver (`events`).
    - Let workers leave, and end the run (`leave`, `give_up`).
    - Take over the current world from a coordinator that has died (`rejoin`), as `Succession` decides.
    """

    # Workers, slots and the driver call the async methods. All methods run on one event loop, so no lock is needed.
    # Storage is accessed in threads, because heartbeats must not wait for storage.
    #
    # The state of this actor may be lost. When the actor dies, Ray starts another one and repeats the pending calls.
    # The new coordinator reads `owner.json` and `events.jsonl`, and the workers send the rest (`rejoin`).
    def __init__(
        self, recovery: RecoveryConfig, membership: Membership, directory: RunDirectory, ownership: Ownership
    ) -> None:
        self.over = False
        self.members: dict[str, Member] = {}
        self.membership = membership
        self._short_since_s: float | None = None  # time at which the workers became too few for a world
        self._wait_s = recovery.wait_s  # time without enough workers, after which the run ends
        self._left_over = 0  # waiting workers in the last event `left_over`
        self._supervisor = Supervisor(recovery, directory / STACKS)
        self._stacks = StackFiles(directory.store)
        self._workers_file = WorkersFile(directory.store)
        self._timeouts = Timeouts(recovery.silence_s)
        self.heartbeats = HeartbeatServer(self._timeouts, self._heard, self.lose, self._patience)
        self._started: asyncio.Task[int] | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # references, because asyncio itself keeps tasks only weakly

        self._directory = directory
        self._ownership = ownership
        self._journal = Journal(directory)
        self._gauges = Gauges(directory.name)
        # At a start every worker may fail once, before the first one elsewhere has joined.
        starts = {_STARTS: recovery.max_failures + membership.expected}
        self._budgets = Budgets(dict.fromkeys(_COUNTED, recovery.max_failures) | starts)
        self._joined: set[tuple[str, int | None]] = set()  # node and process of each worker that has asked for a place
        self._unready: dict[str, str] = {}  # node -> why its last worker failed before it joined
        self._broken_worlds = BrokenWorlds()
        self._seen_failures: dict[tuple[int, str], str | None] = {}  # step and message -> member that reported first
        self._furthest_step = 0  # last step of the ledger, when the ledger was last read
        # Member declared dead -> the cause, until an event records the cause. A member behind a network partition
        # may still call.
        self._dead: dict[str, str] = {}
        # Members without a world. Their call to `join` waits for this future.
        self._waiting: dict[str, asyncio.Future[Answer]] = {}
        self._placed = 0  # the newest attempt whose members have their answer
        self._lines: dict[str, bytes] = {}  # those answers
        self._running = 0  # number of the current attempt, 0 between two attempts
        self._ended: set[int] = set()  # attempts that a former coordinator has seen end
        # Set when the reason to end the current attempt is known. Errors that members report later are consequences.
        self._doomed = asyncio.Event()
        # If a member has died, its missing heartbeats show the death within this time.
        self._all_deaths_known_s = recovery.silence_s + _DEATH_NEWS_S
        self._corrupted_nodes: set[str] = set()  # nodes with a worker that computed wrongly
        self._amendments = directory.amendments()
        self._succession = self._succeed()
        self._ownership.renew_in_background()  # the command that claimed the run has stopped renewing the lease

    # A worker comes, and gets a place in a world.

    async def heartbeat_port(self) -> int:
        """Return the port for heartbeats. The first call opens the port."""
        if self._started is None:
            self._started = asyncio.ensure_future(self._start())
        return await self._started

    async def _start(self) -> int:
        self._spawn(self._watch())
        return await self.heartbeats.listen(ray.util.get_node_ip_address())

    async def admit(self, name: str) -> str:
        """Admit a worker to the heartbeat server. Return the server's secret."""
        return self.heartbeats.admit(name)

    async def ask(self, member: Member, attempt: int) -> None:
        """Ask for the worker's place in the next world.

        The answer comes down the heartbeat connection. A waiting call would occupy one of the actor's concurrent calls
        for each worker.

        Args:
            attempt: the last attempt in which the worker had a place, 0 for none.
        """
        self._joined.add((member.node, member.pid))
        self._unready.pop(member.node, None)
        self._spawn(self._answer(member, attempt))

    async def _answer(self, member: Member, attempt: int) -> None:
        await self._taken_over(member.name)
        # Ray and the worker repeat the call when the coordinator dies, so it may come twice, and also after its answer.
        if member.name in self._waiting:
            self.members[member.name] = member
            return
        if attempt < self._placed and self.membership.rank_of(member.name) is not None:
            # The answer was dropped if the worker was not admitted yet.
            if line := self._lines.get(member.name):
                self.heartbeats.answer(member.name, line)
            return
        try:
            answer = await self.join(member)
        except Exception:  # the worker waits, and would never know
            self.give_up(traceback.format_exc(), FailureKind.EXCEPTION)
            answer = Leave.RUN_ENDED
        line = answer_line(answer if isinstance(answer, Leave) else answer.to_line())
        self._lines[member.name] = line
        self.heartbeats.answer(member.name, line)

    async def join(self, member: Member) -> Answer:
        """Return the worker's place in the next world.

        The call waits until that world forms. The worker must send heartbeats before this call.
        """
        await self._taken_over(member.name)
        if member.name in self._dead:
            # The heartbeats may have ended before the worker's first call to `join`. No event has recorded the cause
            # then.
            if cause := self._dead[member.name]:
                self._dead[member.name] = ""
                self._record_failure(member, FailureKind.WORKER, cause)
            return Leave.RELEASED
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

    def reconcile(self) -> None:
        """Carry out the membership's current decision."""
        if self.over or not self._succession.over or self._nothing_to_save():
            return
        decision = self.membership.decide(time.monotonic())
        if not isinstance(decision, Short):
            self._short_since_s = None
        match decision:
            case Form(members):
                self._spawn(self._form(members))
            case Resize(none_stays) if self._running:
                self._doomed.set()
                saving = self._running if none_stays else 0
                self.heartbeats.command(leave=self._running, save=saving)
            case Wait(seconds):
                asyncio.get_running_loop().call_later(seconds, self.reconcile)
            case Keep():
                self._tell_of_left_over()
            case Short():
                self._short_since_s = self._short_since_s or time.monotonic()

    def _tell_of_left_over(self) -> None:
        left_over = self.membership.left_over
        if left_over != self._left_over:
            self._left_over = left_over
            if left_over:
                unit = self.membership.smallest_replica
                text = f"{plural(left_over, 'worker')} must wait: a replica needs {plural(unit, 'worker')}"
                self.record(events.Notice(event="left_over", text=text, workers=left_over, unit=unit))

    def _nothing_to_save(self) -> bool:
        # Only members of a world can hold a state that is newer than the state on storage.
        return self.heartbeats.commands.stop and not self.membership.world

    async def _form(self, names: tuple[str, ...]) -> None:
        self._end_attempt("all workers lost")
        attempt = await self._next_attempt(names)
        if attempt is None or self.over:
            return
        if names != self.membership.world:  # a member was lost while the coordinator waited for storage
            for name in self.membership.world:
                self.membership.join(name, time.monotonic(), self.members[name].node)
            self.reconcile()
            return
        self._running = self._placed = attempt
        self._lines.clear()
        self._doomed = asyncio.Event()
        self.heartbeats.expect(names)
        store = self.members[names[0]].store
        for rank, name in enumerate(names):
            place = WorldAssignment(rank, len(names), attempt, store, self._amendments)
            self._waiting.pop(name).set_result(place)
        self.reconcile()  # a worker may have joined meanwhile

    async def _next_attempt(self, world: tuple[str, ...]) -> int | None:
        # Storage counts the attempts and refuses commits of a former attempt. So no world forms without a number.
        told = False
        while not self.over:
            try:
                return await asyncio.to_thread(self._ownership.next_attempt, world)
            except OSError as error:
                if not told:
                    self.record(events.Notice(text=f"no world can form until storage can be written: {error}"))
                    told = True
                await asyncio.sleep(_STORAGE_S)
            except RunConflict as error:
                self.give_up(str(error))
        return None

    # A worker is lost, and its world is aborted.

    def lose(self, name: str, cause: str, kind: FailureKind = FailureKind.WORKER) -> None:
        """Declare a worker dead, and abort its world.

        The worker's actor is killed in case the worker is only silent. The surviving members join the next world.
        """
        self._dead[name] = cause
        member = self.members.get(name)
        if member is None:
            return
        # A worker that is only silent could go on later, when the other workers train without it.
        ray.kill(member.actor)
        if not self._succession.over:
            self.members.pop(name)  # `_take_over` records the loss, if the member turns out to be in the world
            return
        if member.node in self._supervisor.draining:
            kind = FailureKind.PREEMPTION
        self._lose_from_world(member, kind, cause)
        self.reconcile()

    def _lose_from_world(self, member: Member, kind: FailureKind, cause: str) -> None:
        self._dead[member.name] = ""
        rank = self.membership.rank_of(member.name)
        if self._forget(member.name):
            self.abort()
            self._record_failure(member, kind, cause, rank)

    def _record_failure(self, member: Member, kind: FailureKind, cause: str, rank: int | None = None) -> None:
        # A loss between two attempts counts for the former attempt.
        attempt = self._ownership.attempt
        failure = events.Failure(
            attempt=attempt,
            kind=kind,
            member=member.name,
            rank=rank,
            pid=member.pid,
            host=member.host,
            node=member.node or None,
            error=cause,
        )
        self.record(failure)
        self._spawn(self._charge_loss(kind, attempt))

    async def _charge_loss(self, kind: FailureKind, attempt: int) -> None:
        await self._look_at_ledger()
        if exceeded := self._budgets.spend(kind, self._furthest_step, attempt):
            self.give_up(exceeded, kind, exceeded)

    async def _look_at_ledger(self) -> None:
        with contextlib.suppress(OSError):  # the step that was read last is good enough
            line = await asyncio.to_thread(self._directory.last_step_line)
            self._furthest_step = int(line.get("step", 0))

    def abort(self) -> None:
        """Command all members to end the current attempt at once."""
        self._doomed.set()
        self.heartbeats.command(aborted=self._ownership.attempt)

    # Checks for what no call reports.

    def _heard(self, name: str, message: Message) -> None:
        self._supervisor.heard(name, message)
        self._stacks.write(name, message, self._ownership.attempt)

    def _patience(self, name: str, silence: Silence) -> float:
        limit_s = self._supervisor.patience(name, silence, self.membership.world)
        self._carry_out(self._supervisor.report_silence(name, silence, limit_s, self._ownership.attempt))
        return limit_s

    async def _watch(self) -> None:
        await self._taken_over()
        # Each check has a loop of its own, so that no check waits while another one waits for Ray or storage.
        await asyncio.gather(
            self._repeat(self._check_drains),
            self._repeat(self._check_requests),
            self._repeat(self._check_shortage),
            self._repeat(self._show_workers),
            self._watch_workers(),
        )

    async def _repeat(self, check: Callable[[], Awaitable[None]]) -> None:
        while not self.over:
            if self._ownership.lost:
                self.give_up(self._ownership.lost)
            try:
                with contextlib.suppress(ray.exceptions.RayError, OSError):  # the next check tries again
                    await check()
            except Exception:  # one failed check must not end the loop
                traceback.print_exc()
            await asyncio.sleep(_INTERVAL_S)

    async def _check_drains(self) -> None:
        if nodes := await asyncio.to_thread(draining_nodes):
            members = {member.name: member.node for member in self.members.values()}
            self._carry_out(self._supervisor.check_drains(nodes, members))

    async def _check_requests(self) -> None:
        for request in await asyncio.to_thread(self._directory.pop_requests):
            match request:
                case ScaleRequest(name, smallest, largest) if not self.heartbeats.commands.stop:
                    before = (self.membership.smallest, self.membership.largest)
                    self.record(events.Scale(before=before, after=(smallest, largest), request=name))
                    self.dismiss(self.membership.rescale(smallest, largest), Leave.RELEASED)
                case KillRequest(_, rank) if self._running and rank < len(self.membership.world):
                    self._kill(rank)
                case KillRequest(_, rank):
                    self.record(events.Notice(text=f"rank {rank} is not killed, as it does not train now"))

    def _kill(self, rank: int) -> None:
        """Kill a worker on request, so that the user sees how the run recovers."""
        name = self.membership.world[rank]
        if name in self.members:
            self.record(events.Notice(text=f"rank {rank} (worker {name}) is killed, as a user has requested"))
            # The death is not declared here: the coordinator detects it by the heartbeats, like any other death.
            ray.kill(self.members[name].actor)

    async def _show_workers(self) -> None:
        attempt, members = self._ownership.attempt, dict(self.members)
        await asyncio.to_thread(self._workers_file.update, attempt, members, dict(self._supervisor.progress))

    async def _check_shortage(self) -> None:
        if self._short_since_s is None:
            return
        waited_s = time.monotonic() - self._short_since_s
        present = len(self.members)
        needed = self.membership.smallest
        self._carry_out(self._supervisor.check_shortage(self._short_since_s, waited_s, present, needed))
        if waited_s > self._wait_s:
            free = await asyncio.to_thread(ray.available_resources)
            failed = [
                f"The last worker on node {node_name(node)} failed: {why}. " for node, why in self._unready.items()
            ]
            self.give_up(
                f"waited {self._wait_s:g} s for workers: {present} of at least {needed} (scaling.num_workers) have "
                f"joined; {int(free.get('CPU', 0))} CPUs and {int(free.get('GPU', 0))} GPUs are free. "
                f"{''.join(failed)}Add nodes, and give the same command again"
            )

    async def _watch_workers(self) -> None:
        lateness = Lateness(_INTERVAL_S)
        while not self.over:
            lateness.begin()
            await asyncio.sleep(_INTERVAL_S)
            _, gap = lateness.woke()
            if gap:
                self._supervisor.discard_reports(time.monotonic())
            now = Situation(
                attempt=self._ownership.attempt,
                world=self.membership.world,
                commands=self.heartbeats.commands,
                now_s=time.monotonic(),
                stretch=lateness.stretch,
            )
            try:
                self._carry_out(self._supervisor.check_workers(now))
            except Exception:  # one failed check must not end the loop
                traceback.print_exc()

    def _carry_out(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Record(event):
                    self.record(event)
                case Dump(attempt):
                    self.heartbeats.command(dump=attempt)
                case Abort():
                    self.abort()
                case Lose(member, cause, kind):
                    self.lose(member, cause, kind)
                case Release(members):
                    self.dismiss(self.membership.send_away(members), Leave.RELEASED)

    # An attempt breaks, and each of its workers reports why.

    async def failed(self, member: str, report: FailureReport) -> bool:
        """Record why an attempt broke. Return whether the run is over."""
        await self._taken_over(member)
        if report.kind is FailureKind.EXCEPTION:
            # A dying peer can make any call of a survivor raise, and the survivor's report may arrive before the
            # death is detected.
            await asyncio.sleep(_DEATH_NEWS_S)
            if report.attempt and report.attempt == self.heartbeats.commands.aborted:
                report = replace(report, kind=FailureKind.PEER)
        return self._judge(member, await self._confirm_cause(report))

    async def _confirm_cause(self, report: FailureReport) -> FailureReport:
        # The worker derives the kind PEER from an error's text. The kind is right if a member of the attempt is lost.
        # A wrong network interface raises the same error, and would do so in every new world.
        if report.kind is not FailureKind.PEER or report.attempt != self._running:
            return report
        try:
            await asyncio.wait_for(self._doomed.wait(), self._all_deaths_known_s)
        except TimeoutError:
            await self._look_at_ledger()
            # Several reports may wait here. The first one ends the attempt, so that the budget is charged once.
            if report.attempt == self._running and not self._doomed.is_set():
                return replace(report, kind=FailureKind.COMMUNICATION)
        return report

    def _judge(self, name: str, report: FailureReport) -> bool:
        if name in self._dead:  # the other members have gone on without this one
            return self.over
        member = self.members.get(name, Member(name, None, ""))
        self._amendments = self._amendments.leaving_out(report.skip)
        match report.kind:
            case FailureKind.PEER:
                cause = "worker lost"
            case FailureKind.NUMERIC:
                cause = report.message
            case FailureKind.COMMUNICATION:
                cause = _NO_COMMUNICATION
                self._charge_communication(member, report)
            case FailureKind.CORRUPTION:
                cause = "corruption"
                self._expel(report)
            case FailureKind.SMALLER:
                cause = "out of memory"
                self._shrink(name, report)
            case _:
                cause = "exception"
                self._charge(member, report)
        self._end_attempt(cause, report)
        return self.over

    def _charge(self, member: Member, report: FailureReport) -> None:
        exceeded = self._budgets.spend(report.kind, report.step)
        # The same exception at the same step from a second member would come back for ever, so the run ends. An error
        # of kind OURS tells the user what to change, so the run ends at once. A worker stops training after an
        # exception, so the same report from the same member is a call that Ray has repeated.
        first = self._seen_failures.setdefault((report.step, report.message), member.name)
        if report.kind is FailureKind.OURS or first != member.name or exceeded is not None:
            self.over = True
        self.record(self._failure(member, report).model_copy(update={"fatal": self.over, "budget": exceeded}))

    async def _charge_start(self, member: Member, report: FailureReport, needs: set[str], alone: bool) -> None:
        await self.heartbeat_port()  # no worker may come that asks for it, so the watch begins here
        await self._look_at_ledger()
        exceeded = self._budgets.spend(_STARTS, self._furthest_step)
        failure = self._failure(member, report)
        again = self._unready.get(member.node) == report.message
        hopeless = (
            report.kind is FailureKind.OURS
            # The same exception on every node is no fault of a node.
            or (report.kind is FailureKind.EXCEPTION and report.message in self._unready.values())
            # Another worker of the node may have a GPU that can be used.
            or (report.kind is FailureKind.DEVICE and alone and not startable())
        )
        self._unready[member.node] = report.message
        if hopeless:
            nodes = await asyncio.to_thread(ray.nodes)
            rooms = {node["NodeID"] for node in nodes if node["Alive"] and needs <= node["Resources"].keys()}
            hopeless = rooms <= self._unready.keys()
        if self.over or self.membership.world or not (hopeless or exceeded):
            if not again:  # otherwise a worker that never starts would be reported every few seconds
                self.record(failure)
            self.reconcile()
            return
        self.over = True
        self.record(failure.model_copy(update={"fatal": True, "budget": exceeded}))
        self.dismiss(list(self._waiting), Leave.RUN_ENDED)

    def _failure(self, member: Member, report: FailureReport) -> events.Failure:
        """Return the event of a worker's report, with rank and process if known."""
        where = {"pid": member.pid, "host": member.host, "node": member.node or None}
        rank = self.membership.rank_of(member.name)
        return report.to_event(member.name or None).model_copy(update={"rank": rank, **where})

    def _shrink(self, member: str, report: FailureReport) -> None:
        # Every rank may have run out of memory, each with another forward size. The smallest size counts.
        size = report.forward_size
        former = self._amendments.forward_size
        if size is not None and (former is None or size < former):
            rank = self.membership.rank_of(member)
            shrunk = events.ForwardsShrunk(step=report.step + 1, forward_size=size, error=report.message, rank=rank)
            self.record(shrunk)

    def _expel(self, report: FailureReport) -> None:
        # All members report the corruption. The first report counts, because afterwards no member has the rank.
        if report.attempt != self._ownership.attempt:
            return
        for name in list(self.members):
            if self.membership.rank_of(name) == report.corrupted:
                self.lose(name, f"computed wrongly in step {report.step + 1}", FailureKind.CORRUPTION)

    def _charge_communication(self, member: Member, report: FailureReport) -> None:
        self.record(self._failure(member, report))
        broken = self._broken_worlds.count(report.attempt)
        exceeded = self._budgets.spend(report.kind, self._furthest_step)
        if reason := broken or exceeded:
            why = f"workers cannot communicate, although no worker was lost: {reason}\n{report.message}\n{_REMEDY}"
            self.give_up(why, report.kind, exceeded)

    def _end_attempt(self, cause: str, report: FailureReport | None = None) -> None:
        # Every survivor reports the end of the attempt, and the first report counts. A new worker that fails before
        # it has a place in a world ends no attempt.
        if self._running and (report is None or report.attempt == self._running):
            step = report.step if report else None
            self.record(events.AttemptEnded(attempt=self._running, cause=cause, step=step))

    # Events of the run, for storage and for this coordinator's own state.

    async def publish(self, event: Event) -> None:
        """Record an event of a worker or a slot."""
        # An event of a former attempt is dropped: it comes from a leader that is cut off from the current world.
        if event.attempt in (None, self._ownership.attempt) and not self._journal.has(event):
            await self.record(event)

    def record(self, event: Event) -> asyncio.Future[None]:
        """Apply an event to the coordinator's state and record the event.

        Return a future that is done once the event is on storage.
        """
        self._observe(event)
        match event:
            case events.Rollback(steps=steps):
                self._amendments = self._amendments.leaving_out(steps)
            case events.ForwardsShrunk(forward_size=size):
                self._amendments = replace(self._amendments, forward_size=size)
            case events.AttemptEnded():
                self._running = 0
                self._doomed.set()
            case events.Finished():
                self.dismiss(list(self._waiting), Leave.RUN_ENDED)
        self._gauges.observe(event)
        return self._journal.write(event)

    def _observe(self, event: Event) -> None:
        """Apply an event of this coordinator or of a former one."""
        self._supervisor.observe(event)
        match event:
            case events.AttemptStarted(attempt=int(attempt)):
                self._broken_worlds.stepped(attempt)
            case events.Failure(kind=FailureKind.CORRUPTION, node=str(node)):
                self._corrupted_nodes.add(node)
            case events.Finished():
                self.over = True

    # Calls of the slots and the driver.

    async def num_slots(self) -> int:
        """Return the number of slots to keep open.

        The number is 0 if the run needs no worker.
        """
        await self._taken_over()
        if self.over or self._nothing_to_save():
            return 0
        return self.membership.wanted

    async def ended(self, member: Member, report: FailureReport, needs: set[str], alone: bool) -> bool:
        """Record the end of a worker's process. Return whether a worker of its node computed wrongly.

        Heartbeats and reports of the worker itself show the end of a worker that has joined.

        Args:
            needs: kinds of resources that a worker has.
            alone: whether Ray has started no other worker.
        """
        if (member.node, member.pid) not in self._joined and member.node not in self._supervisor.draining:
            await self._taken_over()
            await self._charge_start(member, report, needs, alone)
        return member.node in self._corrupted_nodes

    async def events(self, first: int, stop: bool) -> list[Event]:
        """Return the events that the driver has not shown yet.

        These are the kept events of this command from number `first` on, and all other events since the last call.

        Args:
            stop: whether the run shall stop as soon as the workers' state is on storage. A stopped run can be resumed.
        """
        # The driver sends `stop` in each call, because a coordinator that has received it may die.
        if stop and not self.heartbeats.commands.stop:
            self.heartbeats.command(stop=True)
            self._close_if_stopping()
        return self._journal.since(first)

    # Workers leave, and the run ends.

    async def leave(self, name: str) -> None:
        """Remove a worker that ends on purpose, without a failure."""
        await self._taken_over(name)
        if self._forget(name):
            self._doomed.set()
            self.reconcile()

    def _forget(self, name: str) -> bool:
        # Returns whether the member was in the current world.
        self.members.pop(name, None)
        if waiting := self._waiting.pop(name, None):
            waiting.cancel()
        return self.membership.lose(name)

    def dismiss(self, names: list[str], reason: Leave) -> None:
        """Send waiting workers away, and reconcile."""
        for name in names:
            waiting = self._waiting.pop(name, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(reason)
        self.reconcile()

    def _close_if_stopping(self) -> None:
        if self.heartbeats.commands.stop and self._succession.over:
            self.dismiss(self.membership.close(), Leave.RUN_ENDED)

    def give_up(self, why: str, kind: FailureKind = FailureKind.OURS, budget: str | None = None) -> None:
        """End the run as failed, for the reason `why`.

        Args:
            kind: kind of the failure event.
            budget: the exceeded budget in words, if a budget was exceeded.
        """
        self.over = True
        self.abort()
        # The coordinator of a killed command may live on for a moment. The next command would take this failure for one
        # of its own.
        if self._ownership.is_taken_over():
            self._journal.stop_writing()
        self.record(events.Failure(kind=kind, fatal=True, error=why, traceback="", budget=budget))
        self.dismiss(list(self._waiting), Leave.RUN_ENDED)

    async def close(self) -> None:
        """Close the journal, and wait until all events are on storage."""
        self._stacks.close()
        await self._journal.close()

    # The takeover from a former coordinator.

    def _succeed(self) -> Succession:
        """Restore the state of a former coordinator from storage."""
        for event in self._journal.former:
            self._furthest_step = max(self._furthest_step, getattr(event, "step", None) or 0)
            self._learn(event)
        claimed = self._ownership.attempt
        unknown = False
        try:
            self._ownership.renew()
        except RunConflict:
            pass  # `next_attempt` raises the same error and reports it
        except OSError:
            unknown = True
        begun = unknown or self._ownership.attempt > claimed
        world = () if unknown else self._ownership.world
        return Succession(self._timeouts, begun and not self.over, self._ownership.attempt, world)

    def _learn(self, event: Event) -> None:
        self._observe(event)
        match event:
            case events.Scale(after=bounds):
                self.membership.rescale(*bounds)
            case events.AttemptEnded(attempt=int(attempt)):
                self._ended.add(attempt)
                if event.cause == _NO_COMMUNICATION:
                    self._broken_worlds.count(attempt)
            case events.Failure(kind=str(kind), member=member):
                self.over = self.over or event.fatal
                self._budgets.spend(kind if member else _STARTS, self._furthest_step, event.attempt)
                if member is None and event.node:
                    self._unready[event.node] = event.error
                if event.step is not None:
                    self._seen_failures.setdefault((event.step, event.error), member)

    async def _taken_over(self, name: str | None = None) -> None:
        """Wait until the takeover from a former coordinator is complete.

        Afterwards the coordinator knows which members of the world live. `name` is the member that made the request,
        and that therefore is not training.
        """
        if self._succession.over:
            return
        await self.heartbeat_port()  # workers can only rejoin over an open port
        if await self._succession.wait(name):
            self._take_over(self._succession)

    async def rejoin(self, member: Member, place: WorldAssignment | None, commands: Commands) -> bool:
        """Register a worker of the former coordinator.

        Return False if the worker must end, because it was declared dead or because its world has gone on without it.

        Args:
            place: last assignment of the worker.
            commands: last commands that the worker received.
        """
        if member.name in self._dead:
            return False
        if self._succession.over:
            return place is None or member.name in self.members
        if place is not None:
            self._joined.add((member.node, member.pid))
            self._unready.pop(member.node, None)
            self.members[member.name] = member
            self._succession.came(member.name, place)
        self.heartbeats.command(**merged(commands, self.heartbeats.commands))
        return True

    def _take_over(self, former: Succession) -> None:
        place = former.newest
        names = former.world()
        if place is not None:
            self._amendments = self._amendments.leaving_out(place.amendments.skip)
            # If storage counts a newer attempt, no member has received an assignment to that attempt.
            if place.attempt >= self._ownership.attempt and place.attempt not in self._ended:
                self._running = place.attempt
        self.membership.begin(names)
        self.heartbeats.expect(names)
        missing = [name for name in names if name not in self.members]
        follows = f"another one has taken its place, and {len(names) - len(missing)} of {len(names)} workers go on"
        self.record(events.ProcessRestarted(process="the coordinator", follows=follows))
        for name in missing:
            self._lose_from_world(Member(name, None, ""), FailureKind.WORKER, self._dead.get(name) or _NEVER_CAME)
        # A member that still trains in an earlier world is cut off from the members of the newest world.
        for name in former.behind():
            self.lose(name, _NEVER_CAME)
        if former.broken():
            self.abort()
        self._close_if_stopping()
        self.reconcile()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def merged(commands: Commands, others: Commands) -> dict[str, Any]:
    """Return the newest value of each command, as arguments of `HeartbeatServer.command`.

    The newest value is the largest one: a stop is never taken back, and attempt numbers only grow.
    """
    newest = asdict(others)
    for name, value in asdict(commands).items():
        newest[name] = max(value, newest[name])
    return newest
