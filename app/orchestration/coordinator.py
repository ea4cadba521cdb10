"""The coordinator: one actor that seats workers into worlds, passes signals on, and writes the run's events."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from app.owner import Ownership
from app.rundir import RunDirectory
from app.runtime import Event, Signals

_POLL_S = 1.0  # how long a question may wait for its answer before it is asked again


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


@dataclass
class _Table:
    """The workers of one worker group, until all of them have come."""

    size: int
    seated: asyncio.Event = field(default_factory=asyncio.Event)
    ranks: set[int] = field(default_factory=set)
    attempt: int = 0


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
    """

    def __init__(self, directory: RunDirectory, ownership: Ownership, max_failures: int) -> None:
        self._directory, self._ownership, self._max_failures = directory, ownership, max_failures
        self._ownership.keep()
        self._store = dist.TCPStore("0.0.0.0", 0, None, True, wait_for_workers=False)
        self._tables: dict[str, _Table] = {}
        self._signals = Signals()
        self._over = False
        self._running = 0  # the attempt under way, 0 between two
        self._shown: list[Event] = []
        self._events, self._signalled, self._committed = News(), News(), News()
        self._seen_failures: set[tuple[int, str]] = set()
        self._commits: list[Event] = []
        self._registrations: list[Event] = []

    async def join(self, group: str, rank: int, size: int) -> Seat | None:
        """A seat once all `size` workers of `group` have joined; None when the run is over or asked to stop."""
        if self._over or self._signals.stop:
            return None
        table = self._tables.setdefault(group, _Table(size))
        table.ranks.add(rank)
        if len(table.ranks) == size:
            await self._end_attempt("all workers lost")
            self._running = table.attempt = self._ownership.next_attempt()
            self._commits.clear()
            self._registrations.clear()
            table.seated.set()
        await table.seated.wait()
        return Seat(rank, size, table.attempt, self._store.port)

    async def publish(self, event: Event) -> None:
        """Writes an event down, unless it is a mere figure, and shows it to the driver."""
        if event["event"] == "checkpoint":
            self._commits.append(event)
            self._committed.wake()
        if event["event"] == "attempt_ended":
            self._running = 0
        self._show(event if event["event"] == "log" else self._directory.record(event))

    async def failed(self, rank: int, failure: Failure) -> bool:
        """Records a failure; True if the run is over. An exception that comes back at its step would do so for ever."""
        if failure.kind == "peer":
            await self._end_attempt("worker lost", failure.step)
            return self._over
        seen = (failure.step, failure.message)
        self._over |= failure.kind == "ours" or self._max_failures == 0 or seen in self._seen_failures
        self._seen_failures.add(seen)
        shown = {"kind": failure.kind, "error": failure.message, "traceback": failure.traceback}
        await self.publish({"event": "failure", "rank": rank, "step": failure.step, "fatal": self._over, **shown})
        if not self._over:
            await self._end_attempt("exception", failure.step)
        return self._over

    async def events(self, first: int) -> list[Event]:
        """The events from number `first` on; waits a moment for some."""
        if len(self._shown) <= first:
            await self._events.wait()
        return self._shown[first:]

    async def signals(self, known: Signals) -> Signals:
        """The signals once they differ from `known`, or after a moment."""
        if self._signals == known:
            await self._signalled.wait()
        return self._signals

    async def request_stop(self) -> None:
        self._signals = Signals(stop=True)
        self._signalled.wake()

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

    async def _end_attempt(self, cause: str, step: int | None = None) -> None:
        """Told once: every survivor reports the same end."""
        if self._running:
            await self.publish({"event": "attempt_ended", "attempt": self._running, "cause": cause, "step": step})

    def _show(self, event: Event) -> None:
        self._shown.append(event)
        self._events.wake()
