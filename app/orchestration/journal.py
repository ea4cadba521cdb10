"""The run's events while Ray runs the training: written down here alone, and passed on to those who follow them."""

from __future__ import annotations

import asyncio
import contextlib

from app.rundir import RunDirectory, stamped
from app.runtime import Event

_POLL_S = 1.0  # how long a question may wait for its answer before it is asked again


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


class Journal:
    """Lives in one event loop."""

    def __init__(self, directory: RunDirectory) -> None:
        self._stream = directory.open_events()
        self._shown: list[Event] = []
        self._commits: list[Event] = []  # that nobody has registered yet
        self._registrations: list[Event] = []
        self._events, self._committed = News(), News()

    def begin_attempt(self) -> None:
        """Commits of former attempts are not registered any more."""
        self._commits.clear()
        self._registrations.clear()

    def record(self, event: Event) -> None:
        """Writes an event down, unless it is a mere figure, and shows it to the driver."""
        if event["event"] == "checkpoint":
            self._commits.append(event)
            self._committed.wake()
        if event["event"] != "log":
            event = stamped(event)
            self._stream.write([event])
        self._shown.append(event)
        self._events.wake()

    def close(self) -> None:
        """Returns once all is on storage; to be called from another thread than the event loop's."""
        self._stream.close()

    async def events(self, first: int) -> list[Event]:
        """The events from number `first` on; waits a moment for some."""
        if len(self._shown) <= first:
            await self._events.wait()
        return self._shown[first:]

    async def registration(self, attempt: int, number: int) -> Event | None:
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
