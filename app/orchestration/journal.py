"""The journal: the coordinator's events on their way to storage and to the driver."""

import asyncio
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from app.run.directory import RunDirectory
from app.run.events import Event, RunStarted

_REMEMBERED = 10_000  # of the events that a former coordinator wrote: far more than can be under way at its death


class Journal:
    """Write events down beside the event loop, and keep each until the driver has shown it.

    The driver counts the kept events of its command, and so goes on counting when another coordinator takes over: that
    one finds all of them in `events.jsonl`.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self.former = _of_this_command(directory.all_events())  # written before this journal was opened
        self._file = directory.open_events()
        # One thread, so that lines stand in the order in which things happened.
        self._thread = ThreadPoolExecutor(1, "journal")
        self._known = {_key(event) for event in self.former[-_REMEMBERED:]}
        self._news = deque(self.former)  # what the driver has not confirmed
        self._num_confirmed = 0
        self._asked = False

    def has(self, event: Event) -> bool:
        """Return whether a former coordinator has written this event: Ray repeats a call whose answer it missed."""
        return _key(event) in self._known

    def write(self, event: Event) -> asyncio.Future[None]:
        """Write an event down, and keep it for the driver. The result is there once it is on storage."""
        event = event.stamped()
        self._news.append(event)
        return asyncio.wrap_future(self._thread.submit(self._file.write, event))

    def since(self, first: int) -> list[Event]:
        """Return the kept events from number `first` on, and forget those before it. What is only shown comes once."""
        if not self._asked:
            # The driver has been told of some that the former coordinator had no time to write.
            self._num_confirmed = max(0, first - len(self.former))
            self._asked = True
        while self._news and self._num_confirmed < first:
            self._num_confirmed += self._news.popleft().kept
        told = list(self._news)
        self._news = deque(event for event in told if event.kept)
        return told

    async def close(self) -> None:
        """Return once all events are on storage. Nothing is written after it."""
        await asyncio.to_thread(self._thread.shutdown)
        await asyncio.to_thread(self._file.close)


def _of_this_command(events: Iterable[Event]) -> list[Event]:
    found: list[Event] = []
    for event in events:
        if isinstance(event, RunStarted):
            found.clear()
        else:
            found.append(event)
    return found


def _key(event: Event) -> tuple[str, float | None, int | None]:
    return event.name, event.time_s, event.attempt
