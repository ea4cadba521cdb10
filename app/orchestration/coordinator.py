"""The coordinator: one actor that seats workers into worlds, passes orders on, and writes the run's events."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import asdict, replace

import ray
import torch.distributed as dist

from app.config import Config
from app.errors import RunConflict
from app.faults.watchdog import Snapshot, Stall, Watchdog, straggler
from app.orchestration.internals.nodes import draining
from app.orchestration.journal import Journal
from app.orchestration.lifeline import Lifelines, Message, Orders
from app.orchestration.membership import Form, Membership, Resize, Short, Wait
from app.orchestration.messages import Dismissal, Failure, Member, Seat, SlotOrders
from app.orchestration.policies import Budgets
from app.owner import Ownership
from app.rundir import RunDirectory
from app.runtime import Event

_WATCH_S = 0.25  # between two looks at what nobody tells: draining nodes, wishes for another scale
_SETTLE_S = 5.0  # how long the first world waits for the rest of the workers that have room
_GATHER_S = 0.3  # how long a newcomer waits for others
_PATIENCE_S = 10.0  # how long a run is short of workers before it says so
_STRAGGLERS_S = 60.0  # how often who makes others wait is named
_STORAGE_S = 1.0  # how long after storage has refused it is asked again
_LAST_WORDS_S = 0.5  # for the stacks of a hung world to arrive
_SECOND_THOUGHT_S = 0.5  # for the news of a death to arrive, before an exception counts as the user's


class Coordinator:
    """Async actor: every method runs on one event loop, so no state here needs a lock.

    Args:
        directory: where events are written; this is their only writer while Ray runs the training.
        ownership: the command's claim, renewed from here on.
        expected: the first world waits a while for so many workers.
        slots: survivors keep running, and the size of a world is decided here rather than by Ray.
    """

    def __init__(
        self, config: Config, directory: RunDirectory, ownership: Ownership, expected: int, slots: bool
    ) -> None:
        self._config, self._directory, self._ownership, self._slots = config, directory, ownership, slots
        self._ownership.keep()
        low, high = config.scaling.num_workers
        self._membership = Membership(low, high, expected, _SETTLE_S, _GATHER_S)
        self._budgets = Budgets(dict.fromkeys(("worker", "hang", "exception", "oom"), config.recovery.max_failures))
        self._lifelines = Lifelines(config.recovery.silence_s, self._heard, self._lost)
        self._started: asyncio.Future[int] | None = None
        self._members: dict[str, Member] = {}
        # Or taken for it: from behind a partition they may be heard of again. Why, until an event has told of it.
        self._dead: dict[str, str] = {}
        self._seats: dict[str, asyncio.Future[Seat | Dismissal]] = {}
        self._orders = Orders()
        self._over = False
        self._skip = directory.skipped_steps()
        self._running = 0  # the attempt under way, 0 between two
        self._store: dist.TCPStore | None = None
        self._short_since: float | None = None
        self._told_of_wait = False
        self._draining: set[str] = set()
        self._watchdog = Watchdog()
        self._snapshots: dict[str, Snapshot] = {}
        self._former: tuple[float, dict[str, Snapshot]] = 0.0, {}
        self._journal = Journal(directory)
        self._seen_failures: set[tuple[int, str]] = set()

    async def lifeline_port(self) -> int:
        if self._started is None:
            self._started = asyncio.ensure_future(self._lifelines.listen())
            self._watching = asyncio.ensure_future(self._watch())
        return await self._started

    async def join(self, member: Member, group_size: int | None) -> Seat | Dismissal:
        """A seat in the next world.

        Args:
            member: a worker with a lifeline.
            group_size: the size that the world must have, where Ray decides it; None where any within bounds is right.
        """
        if self._slots and member.name in self._dead:
            if cause := self._dead[member.name]:  # before it came here for the first time
                self._dead[member.name] = ""
                self._mourn(member, "worker", cause)
            return Dismissal.LEFT
        if self._over or (self._orders.stop and member.name not in self._membership.world):
            return Dismissal.DONE
        if group_size is not None:
            self._membership.rescale(group_size, group_size)
            self._membership.expected = group_size
        self._members[member.name] = member
        if not self._membership.join(member.name, _now()) or member.node in self._draining:
            self._forget(member.name)
            self._review()
            return Dismissal.LEFT
        seat: asyncio.Future[Seat | Dismissal] = asyncio.get_running_loop().create_future()
        self._seats[member.name] = seat
        self._review()
        return await seat

    async def leave(self, name: str) -> None:
        """`name` is done with the run: its lifeline may end."""
        if self._forget(name):
            self._review()

    async def slots(self) -> SlotOrders:
        return SlotOrders(self._membership.largest, self._over or self._nothing_to_save())

    def _nothing_to_save(self) -> bool:
        """The run has been asked to stop, and nobody is left who holds more than storage does."""
        return self._orders.stop and not self._membership.world

    def _review(self) -> None:
        if self._over or self._nothing_to_save():
            return
        decision = self._membership.decide(_now())
        if not isinstance(decision, Short):
            self._short_since, self._told_of_wait = None, False
        match decision:
            case Form(members):
                self._form(members)
            case Resize(none_stays) if self._running:
                save = self._running if none_stays else 0
                self._order(replace(self._orders, leave=self._running, save=save))
            case Wait(seconds):
                asyncio.get_running_loop().call_later(seconds, self._review)
            case Short():
                self._short_since = self._short_since or _now()

    def _form(self, names: tuple[str, ...]) -> None:
        if names != self._membership.world:  # one has been lost while storage did not answer
            return
        self._end_attempt("all workers lost")
        try:
            self._running = attempt = self._ownership.next_attempt()
        except OSError as error:
            self._record({"event": "waiting_for_storage", "error": str(error)})
            asyncio.get_running_loop().call_later(_STORAGE_S, self._form, names)
            return
        except RunConflict as error:
            self._give_up(str(error))
            return
        self._journal.begin_attempt()
        self._store = dist.TCPStore("0.0.0.0", 0, None, True, wait_for_workers=False)
        for rank, name in enumerate(names):
            self._seats.pop(name).set_result(Seat(rank, len(names), attempt, self._store.port, self._skip))

    def _heard(self, name: str, message: Message) -> None:
        if "progress" in message:
            self._snapshots[name] = Snapshot(**message["progress"])
        if "stacks" in message:
            file = f"stacks/attempt-{self._ownership.attempt}-{name}.txt"
            with contextlib.suppress(OSError):
                self._directory.store.commit(file, message["stacks"].encode())

    def _lost(self, name: str, cause: str, kind: str = "worker") -> None:
        """A lifeline has ended. The world it was in is told at once; whoever lives joins the next one."""
        member = self._members.get(name)
        self._dead[name] = "" if member else cause
        if member is None:
            return
        was_in = self._forget(name)
        ray.kill(member.actor)  # one that is only silent would wake up in a world that has gone on
        if was_in:
            kind = "preemption" if member.node in self._draining else kind
            self._abort()
            self._mourn(member, kind, cause)
        self._review()

    def _mourn(self, member: Member, kind: str, cause: str) -> None:
        self._record({"event": "failure", "kind": kind, "member": member.name, "node": member.node, "error": cause})
        if self._slots and (why := self._budgets.spend(kind, self._last_step())):
            self._give_up(why)

    def _abort(self) -> None:
        """The world under way is no more: its members hear it at once, also those who still form it, whose store ends
        with it."""
        self._order(replace(self._orders, aborted=self._ownership.attempt))
        self._store = None

    def _forget(self, name: str) -> bool:
        """True if the world under way counted on it."""
        self._members.pop(name, None)
        self._snapshots.pop(name, None)
        if seat := self._seats.pop(name, None):
            seat.cancel()
        return self._membership.lose(name)

    def _dismiss(self, names: list[str], reason: Dismissal) -> None:
        for name in names:
            if (seat := self._seats.pop(name, None)) and not seat.done():
                seat.set_result(reason)

    def _order(self, orders: Orders) -> None:
        self._orders = orders
        self._lifelines.order(orders)

    async def _watch(self) -> None:
        while self._slots and not self._over:
            with contextlib.suppress(ray.exceptions.RayError, OSError):  # what cannot be read now is read next time
                self._mind_drains(await asyncio.get_running_loop().run_in_executor(None, draining))
                self._mind_scale(await asyncio.get_running_loop().run_in_executor(None, self._directory.take_scale))
                self._mind_the_wait()
                await self._mind_progress()
            await asyncio.sleep(_WATCH_S)

    def _mind_drains(self, nodes: dict[str, float]) -> None:
        for node in nodes.keys() - self._draining:
            names = [member.name for member in self._members.values() if member.node == node]
            self._draining.add(node)
            if names:
                self._record({"event": "preemption", "node": node, "deadline_s": nodes[node], "members": names})
                self._dismiss(self._membership.send_away(names), Dismissal.LEFT)
                self._review()

    def _mind_scale(self, wish: tuple[int, int] | None) -> None:
        if wish is not None and not self._orders.stop:
            before = [self._membership.smallest, self._membership.largest]
            self._dismiss(self._membership.rescale(*wish), Dismissal.LEFT)
            self._record({"event": "scale", "before": before, "after": wish})
            self._review()

    async def _mind_progress(self) -> None:
        world = {name: self._snapshots.get(name) for name in self._membership.world}
        snapshots = {name: each for name, each in world.items() if each and each.attempt == self._ownership.attempt}
        if not world or len(snapshots) < len(world):
            return
        if stall := self._watchdog.look(snapshots):
            await self._end_stall(stall)
        since_s, former = self._former
        if _now() - since_s > _STRAGGLERS_S:
            if found := straggler(former, snapshots):
                self._record({"event": "straggler", **asdict(found)})
            self._former = _now(), snapshots

    async def _end_stall(self, stall: Stall) -> None:
        """Without those who are stuck; without anybody only if all were, and an abort has not freed them."""
        attempt = self._ownership.attempt
        said = {"ranks": stall.ranks, "phase": stall.phase, "step": stall.step, "seconds": round(stall.seconds, 1)}
        self._record({"event": "hang", "attempt": attempt, **said, "stacks": self._directory / "stacks"})
        self._order(replace(self._orders, dump=attempt))
        await asyncio.sleep(_LAST_WORDS_S)
        if not stall.waiting and self._orders.aborted != attempt:
            self._abort()
            return
        for name in stall.members:
            self._lost(name, f"hung in {stall.phase} for {stall.seconds:.1f} s", "hang")

    def _mind_the_wait(self) -> None:
        """A run that is short of workers says what is missing, and does not wait for ever."""
        if self._short_since is None:
            return
        waited_s, present, needed = _now() - self._short_since, len(self._members), self._membership.smallest
        if waited_s > _PATIENCE_S and not self._told_of_wait:
            self._told_of_wait = True
            self._record({"event": "waiting", "workers": present, "needed": needed})
        limit_s = self._config.recovery.wait_s
        if waited_s > limit_s:
            free = ray.available_resources()
            self._give_up(
                f"waited {limit_s:g} s for workers: {present} of at least {needed} (scaling.num_workers) are there; "
                f"{int(free.get('CPU', 0))} CPUs and {int(free.get('GPU', 0))} GPUs are free. "
                "Add nodes, and give the same command again"
            )

    def _last_step(self) -> int:
        return int((self._directory.last_step_line() or {}).get("step", 0))

    def _give_up(self, why: str) -> None:
        self._over = True
        self._abort()
        self._record({"event": "failure", "kind": "ours", "fatal": True, "error": why, "traceback": ""})
        self._dismiss(list(self._seats), Dismissal.DONE)

    async def publish(self, event: Event) -> None:
        """Writes an event down, unless it is a mere figure, and shows it to the driver. Not so from an attempt that
        others have succeeded: who was its leader has been cut off from them."""
        if event.get("attempt", self._ownership.attempt) == self._ownership.attempt:
            self._record(event)

    def _record(self, event: Event) -> None:
        if event["event"] == "rollback":
            self._skip |= set(event["steps"])
        if event["event"] == "attempt_ended":
            self._running = 0
        if event["event"] == "finished":
            self._over = True
            self._dismiss(list(self._seats), Dismissal.DONE)
        self._journal.record(event)

    async def failed(self, member: str, failure: Failure) -> bool:
        """Records a failure; True if the run is over. An exception that comes back at its step would do so for ever."""
        kind = failure.kind
        if kind == "exception" and self._slots:
            await asyncio.sleep(_SECOND_THOUGHT_S)
            kind = "peer" if failure.attempt and self._orders.aborted == failure.attempt else kind
        if member in self._dead:
            return self._over
        self._skip |= set(failure.skip)
        if kind in ("peer", "numeric"):
            self._end_attempt("worker lost" if kind == "peer" else failure.message, failure)
            return self._over
        seen = (failure.step, failure.message)
        why = self._budgets.spend(kind, failure.step)
        self._over |= kind == "ours" or seen in self._seen_failures or why is not None
        self._seen_failures.add(seen)
        shown = {"kind": kind, "error": failure.message, "traceback": failure.traceback, "budget": why}
        self._record({"event": "failure", "member": member, "step": failure.step, "fatal": self._over, **shown})
        self._end_attempt("exception", failure)
        return self._over

    async def events(self, first: int) -> list[Event]:
        return await self._journal.events(first)

    async def close(self) -> None:
        """The last call: nothing is recorded after it."""
        await asyncio.get_running_loop().run_in_executor(None, self._journal.close)

    async def registration(self, attempt: int, number: int) -> Event | None:
        return await self._journal.registration(attempt, number)

    async def request_stop(self) -> None:
        self._order(replace(self._orders, stop=True))
        self._dismiss(self._membership.close(), Dismissal.DONE)
        self._review()

    def _end_attempt(self, cause: str, failure: Failure | None = None) -> None:
        """Told once: every survivor reports the same end. A newcomer that fails before it has a seat ends nothing."""
        if self._running and (failure is None or failure.attempt == self._running):
            step = failure.step if failure else None
            self._record({"event": "attempt_ended", "attempt": self._running, "cause": cause, "step": step})


def _now() -> float:
    return asyncio.get_running_loop().time()
