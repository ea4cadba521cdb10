"""Write the stacks and collectives that hung workers send."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

from steadfast.liveness.flight_recorder import unpack
from steadfast.orchestration.heartbeat import Message
from steadfast.run.directory import STACKS
from steadfast.storage import Store


class StackFiles:
    """Writer of the folder `stacks/`, with a thread, because storage may take any time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._unwritten: dict[str, bytes] = {}  # contents to write, by file
        self._thread = ThreadPoolExecutor(1, "stacks")

    def write(self, name: str, message: Message, attempt: int) -> None:
        """Write the stacks and collectives in a worker's message, if any."""
        if "stacks" in message:
            self._write_later(f"attempt-{attempt}-{name}.txt", message["stacks"].encode())
        if "collectives" in message:
            # torchfrtrace expects a folder for each attempt and file names that end with the rank.
            progress = message["progress"]
            file = f"attempt-{progress['attempt']}-collectives/rank-{progress['rank']}"
            self._write_later(file, unpack(message["collectives"]))

    def close(self) -> None:
        """Accept no more files. Files that were accepted are still written."""
        self._thread.shutdown(wait=False)

    def _write_later(self, file: str, contents: bytes) -> None:
        # Newer contents replace those that wait to be written, so that slow storage does not fill the memory.
        self._unwritten[file] = contents
        self._thread.submit(self._write_one)

    def _write_one(self) -> None:
        with contextlib.suppress(OSError, KeyError):
            file, contents = self._unwritten.popitem()
            self._store.commit(f"{STACKS}/{file}", contents)
