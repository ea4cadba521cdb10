"""The coordinator: one actor that seats workers into worlds, passes orders on, and writes the run's events."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch.distributed as dist

from app.orchestration.lifeline import Lifelines, Orders
from app.orchestration.membership import Form, Membership, Resize, Wait
from app.owner import Ownership
from app.rundir import RunDirectory
from app.runtime import Event

_POLL_S = 1.0  # how long a question may wait for its answer before it is asked again
_SETTLE_S = 5.0  # how long the first world waits for the rest of the workers that have room
_GATHER_S = 0.3  # how long a newcomer waits for others


@dataclass(frozen=True)
class Failure:
    """Why an attempt broke, told by the worker that saw it.

    kind: "peer" when another worker is gone, "ours" for an error with a message of its own, "user" for any other.
    """

    kind: str
    step: int
    message: str
    traceback: str


@dataclass(frozen=True)
class Seat:
    """A place in a world that has formed; its store is the coordinator's."""

    rank: int
    size: int
    attempt: int
    store_port: int


class News:
    """Something that several may wait for."""

    def __init__(self) -> None:
        self._come = asyncio.Event()

    async def wait(self) -> None:
        """Until the next `wake`, or for a moment."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._come.wait(), _POLL_S)

    def wake(self) -> None:
        self._come.set()
        self._come = asyncio.Event()


class Coordinator:
    """Async actor: every method runs on one event loop, so no state here needs a lock.

    Args:
        directory: where events are written; this is their only writer while Ray runs the training.
        ownership: the command's claim, renewed from here on.
        max_failures: 0 lets the first exception end the run.
        smallest, expected: a world has at least `smallest` workers; the first one waits a while for `expected`.
        silence_s: a worker that is not heard of for so long is dead.
    """

    def __init__(
        self,
        directory: RunDirectory,
        ownership: Ownership,
        max_failures: int,
        smallest: int,
        expected: int,
        silence_s: float,
    ) -> None:
        self._directory, self._ownership, self._max_failures = directory, ownership, max_failures
        self._ownership.keep()
        self._store = dist.TCPStore("0.0.0.0", 0, None, True, wait_for_workers=False)
        self._membership = Membership(smallest, expected, _SETTLE_S, _GATHER_S)
        self._lifelines = Lifelines(silence_s, self._lost)
        self._lifeline_port: asyncio.Future[int] | None = None
        self._actors: dict[str, Any] = {}
        self._seats: dict[str, asyncio.Future[Seat | None]] = {}
        self._orders = Orders()
        self._over = False
        self._running = 0  # the attempt under way, 0 between two
        self._shown: list[Event] = []
        self._events, self._committed = News(), News()
        self._seen_failures: set[tuple[int, str]] = set()
        self._commits: list[Event] = []
        self._registrations: list[Event] = []

    async def lifeline_port(self) -> int:
        if self._lifeline_port is None:
            self._lifeline_port = asyncio.ensure_future(self._lifelines.listen())
        return await self._lifeline_port

    async def join(self, member: str, actor: Any, group_size: int | None) -> Seat | None:
        """A seat in the next world; None when the run is over or asked to stop.

        Args:
            member: a worker with a lifeline.
            actor: its handle, to kill it if it falls silent.
            group_size: the size that the world must have, where Ray decides it; None where any from the smallest is.
        """
        if self._over or self._orders.stop:
            return None
        if group_size is not None:
            self._membership.smallest = self._membership.expected = group_size
        self._actors[member] = actor
        self._seats[member] = asyncio.get_running_loop().create_future()
        self._membership.join(member, _now())
        self._review()
        return await self._seats[member]

    async def leave(self, member: str) -> None:
        """`member` is done with the run: its lifeline may end."""
        self._actors.pop(member, None)
        if self._membership.lose(member):
            self._review()

    def _review(self) -> None:
        match self._membership.decide(_now()):
            case Form(members):
                self._end_attempt("all workers lost")
                self._running = attempt = self._ownership.next_attempt()
                self._commits.clear()
                self._registrations.clear()
                for rank, member in enumerate(members):
                    self._seats[member].set_result(Seat(rank, len(members), attempt, self._store.port))
            case Resize() if self._running:
                self._order(replace(self._orders, leave=self._running))
            case Wait(seconds):
                asyncio.get_running_loop().call_later(seconds, self._review)

    def _lost(self, member: str, cause: str) -> None:
        """A lifeline has ended. The world it was in is told at once; whoever lives joins the next one."""
        actor = self._actors.pop(member, None)
        if actor is None:
            return
        if self._membership.lose(member) and self._running:
            self._order(replace(self._orders, aborted=self._running))
            self._record({"event": "failure", "kind": "worker", "member": member, "error": cause})
        if member in self._seats:
            self._seats.pop(member).cancel()
        ray.kill(actor)  # one that is only silent would wake up in a world that has gone on
        self._review()

    def _dismiss(self) -> None:
        """There is no next world for those who wait for it."""
        for seat in self._seats.values():
            if not seat.done():
                seat.set_result(None)

    def _order(self, orders: Orders) -> None:
        self._orders = orders
        self._lifelines.order(orders)

    async def publish(self, event: Event) -> None:
        """Writes an event down, unless it is a mere figure, and shows it to the driver."""
        self._record(event)

    def _record(self, event: Event) -> None:
        if event["event"] == "checkpoint":
            self._commits.append(event)
            self._committed.wake()
        if event["event"] == "attempt_ended":
            self._running = 0
        if event["event"] == "finished":
            self._over = True
            self._dismiss()
        self._show(event if event["event"] == "log" else self._directory.record(event))

    async def failed(self, member: str, failure: Failure) -> bool:
        """Records a failure; True if the run is over. An exception that comes back at its step would do so for ever."""
        if failure.kind == "peer":
            self._end_attempt("worker lost", failure.step)
            return self._over
        seen = (failure.step, failure.message)
        self._over |= failure.kind == "ours" or self._max_failures == 0 or seen in self._seen_failures
        self._seen_failures.add(seen)
        shown = {"kind": failure.kind, "error": failure.message, "traceback": failure.traceback}
        self._record({"event": "failure", "member": member, "step": failure.step, "fatal": self._over, **shown})
        if not self._over:
            self._end_attempt("exception", failure.step)
        return self._over

    async def events(self, first: int) -> list[Event]:
        """The events from number `first` on; waits a moment for some."""
        if len(self._shown) <= first:
            await self._events.wait()
        return self._shown[first:]

    async def request_stop(self) -> None:
        self._order(replace(self._orders, stop=True))
        self._dismiss()

    async def registration(self, attempt: int, number: int) -> dict[str, Any] | None:
        """Which commit the workers of `attempt` register as their `number`-th, the same for all; None if none yet.

        The newest wins: commits that were overtaken before anyone asked are not registered.
        """
        if len(self._registrations) <= number and self._commits:
            self._registrations.append(self._commits[-1])
            self._commits.clear()
        if len(self._registrations) <= number:
            await self._committed.wait()
            return None
        found = self._registrations[number]
        return found if found["attempt"] == attempt else None

    def _end_attempt(self, cause: str, step: int | None = None) -> None:
        """Told once: every survivor reports the same end."""
        if self._running:
            self._record({"event": "attempt_ended", "attempt": self._running, "cause": cause, "step": step})

    def _show(self, event: Event) -> None:
        self._shown.append(event)
        self._events.wake()


def _now() -> float:
    return asyncio.get_running_loop().time()
