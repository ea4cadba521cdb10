"""Journal of the coordinator's events, for storage and the driver."""

import asyncio
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from steadfast.run.directory import RunDirectory
from steadfast.run.events import Event, Notice, RunStarted

_REMEMBERED = 10_000  # former events to recognise; far more than could be under way when the coordinator died


class Journal:
    """Writer of the coordinator's events.

    A thread writes the events, and each event is kept until the driver has shown the event. The driver asks for events
    by the number of kept events that it has shown. These numbers stay valid when another coordinator takes over,
    because `events.jsonl` contains all kept events of the command.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self.former = _of_this_command(directory.all_events())  # events that a former coordinator has written
        self._file = directory.open_events()
        # A single thread keeps the lines in the order of the events.
        self._thread = ThreadPoolExecutor(1, "journal")
        self._known = {_key(event) for event in self.former[-_REMEMBERED:]}
        self._news = deque(self.former)  # events that the driver has not confirmed
        self._num_confirmed = 0
        self._asked = False
        self._writes = True  # False once the run belongs to another command

    def has(self, event: Event) -> bool:
        """Return whether a former coordinator has written this event.

        Ray repeats a call to `publish` if the former coordinator died before its answer.
        """
        return _key(event) in self._known

    def write(self, event: Event) -> asyncio.Future[None]:
        """Write an event, and keep the event for the driver.

        Return a future that is done once the event is on storage.
        """
        event = event.stamped()
        self._news.append(event)
        if self._writes:
            return asyncio.wrap_future(self._thread.submit(self._file.write, event))
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        written.set_result(None)
        return written

    def stop_writing(self) -> None:
        """Keep further events for the driver only.

        Called once another command owns the run, because only the owner may write the run's events.
        """
        self._writes = False

    def since(self, first: int) -> list[Event]:
        """Return the kept events from number `first` on, and forget earlier events."""
        if not self._asked:
            # The driver may have shown events that the former coordinator had no time to write.
            self._num_confirmed = max(0, first - len(self.former))
            self._asked = True
        while self._news and self._num_confirmed < first:
            self._num_confirmed += self._news.popleft().kept
        told = list(self._news)
        # Events that are only shown have no number, so the driver cannot confirm these, and gets them once.
        self._news = deque(event for event in told if event.kept)
        return told

    async def close(self) -> None:
        """Wait until all events are on storage, and close the file."""
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


def _key(event: Event) -> tuple[str, float | None, int | None, str]:
    # Events have no id. A call that Ray repeats carries the time at which the worker has stamped the event. Several
    # notices at the beginning of an attempt may have one time, so their text counts too.
    text = event.text if isinstance(event, Notice) else ""
    return event.name, event.time_s, event.attempt, text
