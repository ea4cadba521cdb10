"""The heartbeat channel: one connection between each worker and the coordinator. While it is open, the worker lives."""

# A process that dies closes it, which the coordinator notices within milliseconds. One that falls silent (a machine
# without power, a stopped process) is noticed by its missing heartbeats, which also say how far a worker is. The
# coordinator sends its commands the other way, so that no worker has to ask for them. A message is one line of JSON.
import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from app.world.timeouts import Timeouts

Message = dict[str, Any]
_LONGEST_LINE_BYTES = 2**20  # the stacks of a process, at most


@dataclass(frozen=True)
class Commands:
    """What the coordinator tells all workers: everything each time, so that a newer one replaces all before it."""

    stop: bool = False
    # The number of an attempt, 0 for none.
    leave: int = 0  # to end at an agreed step
    save: int = 0  # to write a checkpoint before it ends
    dump: int = 0  # to send stacks, since it is stuck
    aborted: int = 0  # to end at once, since it has lost a member


class HeartbeatServer:
    """Receive heartbeats, and notice which workers are lost. Lives in the coordinator's event loop."""

    def __init__(
        self, timeouts: Timeouts, on_message: Callable[[str, Message], None], on_lost: Callable[[str, str], None]
    ) -> None:
        self.commands = Commands()  # the last ones; workers that connect later are told them too
        self._timeouts = timeouts
        self._on_message = on_message
        # Called once with the name of each worker that is lost, and the cause: its connection has ended, or it has been
        # silent for too long.
        self._on_lost = on_lost
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._in_world: set[str] = set()

    async def listen(self) -> int:
        """Accept workers from now on. Return the port."""
        self._server = await asyncio.start_server(self._serve, "0.0.0.0", 0, limit=_LONGEST_LINE_BYTES)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def command(self, **changes: Any) -> None:
        """Change some of the commands and send all of them to every worker."""
        self.commands = replace(self.commands, **changes)
        for writer in self._writers.values():
            writer.write(_line(asdict(self.commands)))

    def expect(self, names: Iterable[str]) -> None:
        """Let `silence_s` count for these workers from now on: they are in a world, where others wait for them."""
        self._in_world.update(names)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        member = (await reader.readline()).decode().strip()
        self._writers[member] = writer
        writer.write(_line(asdict(self.commands)))
        cause = "connection closed"
        try:
            while line := await self._next_line(member, reader):
                self._on_message(member, json.loads(line))
                writer.write(b"\n")
        except TimeoutError as error:
            cause = str(error)
        except OSError as error:
            cause = str(error)
        except ValueError:  # the last line of a dying worker may be half a message
            pass
        finally:
            del self._writers[member]
            self._in_world.discard(member)
            writer.close()
            self._on_lost(member, cause)

    async def _next_line(self, member: str, reader: asyncio.StreamReader) -> bytes:
        """Return the next line, b"" at the end of the connection. Raises TimeoutError if the worker is silent."""
        heard_s = time.monotonic()
        while True:
            try:
                return await asyncio.wait_for(reader.readline(), self._timeouts.silence_s)
            except TimeoutError:
                # On a busy machine a worker that imports and builds its model may leave its heartbeats no time.
                limit_s = self._timeouts.silence_s if member in self._in_world else self._timeouts.lease_s
                if time.monotonic() - heard_s >= limit_s:
                    raise TimeoutError(f"not heard of for {limit_s:g} s") from None


class HeartbeatClient:
    """Send a worker's heartbeats, and pass its commands on. It has a thread of its own."""

    def __init__(
        self,
        address: tuple[str, int],
        member: str,
        timeouts: Timeouts,
        beat: Callable[[], Message],
        on_commands: Callable[[Commands | None], None],
        find_again: Callable[[float], tuple[str, int] | None] = lambda _: None,
    ) -> None:
        self.ended = False  # the coordinator is gone, or takes this worker for dead
        # The thread calls both: one for what a heartbeat says, one with what comes, and None once nothing can come.
        self._beat = beat
        self._on_commands = on_commands
        # Called when the connection has ended, with the seconds that are left: returns where the coordinator is by now,
        # or None if it does without this worker.
        self._find_again = find_again
        self._member = member
        self._timeouts = timeouts
        self._closing = threading.Event()
        self._heard_s = 0.0
        self._socket = self._connect(address)
        self.own_address = str(self._socket.getsockname()[0])  # of the interface that leads to the coordinator
        threading.Thread(target=self._run, daemon=True, name="heartbeat").start()

    def send(self, message: Message) -> None:
        """Send a message between two heartbeats; only on the thread that `on_commands` is called on."""
        self._socket.sendall(_line(message))

    def close(self) -> None:
        self._closing.set()
        self._socket.close()

    def _connect(self, address: tuple[str, int]) -> socket.socket:
        connection = socket.create_connection(address, timeout=self._timeouts.form.total_seconds())
        # A heartbeat is small, and must not wait until there is more to send.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(f"{self._member}\n".encode())
        connection.settimeout(self._timeouts.heartbeat_s)
        self._heard_s = time.monotonic()
        return connection

    def _run(self) -> None:
        self._converse()
        # A coordinator that dies is started again, and the world under way goes on meanwhile.
        while self._reconnect():
            self._converse()
        self.ended = True
        self._socket.close()
        self._on_commands(None)

    def _converse(self) -> None:
        """Send heartbeats and pass commands on until the connection ends, or nothing has come for `lease_s`."""
        unread = b""
        with contextlib.suppress(OSError):
            # The server answers each heartbeat. A worker that misses the answers is cut off from the others. They take
            # it for dead and go on without it, so it must not go on by itself.
            while self._left_s > 0:
                try:
                    received = self._socket.recv(4096)
                except TimeoutError:
                    self.send(self._beat())
                    continue
                if not received:
                    break
                self._heard_s = time.monotonic()
                *lines, unread = (unread + received).split(b"\n")
                for line in lines:
                    if line:  # an empty one only answers a heartbeat
                        self._on_commands(Commands(**json.loads(line)))

    def _reconnect(self) -> bool:
        """Connect to the coordinator's successor. Return False if there is none for this worker, or none in time."""
        self._socket.close()
        while not self._closing.is_set() and self._left_s > 0:
            address = self._find_again(self._left_s)
            if address is None:
                return False
            with contextlib.suppress(OSError):
                self._socket = self._connect(address)
                return True
            self._closing.wait(self._timeouts.heartbeat_s)
        return False

    @property
    def _left_s(self) -> float:
        return self._heard_s + self._timeouts.lease_s - time.monotonic()


def _line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"
