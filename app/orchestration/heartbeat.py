"""The heartbeat channel: one connection between each worker and the coordinator. While it is open, the worker lives."""

# A process that dies closes it, which the coordinator notices within milliseconds. One that falls silent (a machine
# without power, a stopped process) is noticed by its missing heartbeats, which also say how far a worker is. The
# coordinator sends its commands the other way, so that no worker has to ask for them. A message is one line of JSON.
import asyncio
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
    ) -> None:
        self.ended = False  # the coordinator is gone, or takes this worker for dead
        # The thread calls both: one for what a heartbeat says, one with what comes, and None once nothing can come.
        self._beat = beat
        self._on_commands = on_commands
        self._lease_s = timeouts.lease_s
        self._socket = socket.create_connection(address, timeout=timeouts.form.total_seconds())
        # A heartbeat is small, and must not wait until there is more to send.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(f"{member}\n".encode())
        self._socket.settimeout(timeouts.heartbeat_s)
        self.own_address = str(self._socket.getsockname()[0])  # of the interface that leads to the coordinator
        threading.Thread(target=self._run, daemon=True, name="heartbeat").start()

    def send(self, message: Message) -> None:
        """Send a message between two heartbeats; only on the thread that `on_commands` is called on."""
        self._socket.sendall(_line(message))

    def close(self) -> None:
        self._socket.close()

    def _run(self) -> None:
        unread = b""
        heard_s = time.monotonic()
        try:
            # The server answers each heartbeat. A worker that misses the answers is cut off from the others. They take
            # it for dead and go on without it, so it must not go on by itself.
            while time.monotonic() - heard_s < self._lease_s:
                try:
                    received = self._socket.recv(4096)
                except TimeoutError:
                    self.send(self._beat())
                    continue
                if not received:
                    break
                heard_s = time.monotonic()
                *lines, unread = (unread + received).split(b"\n")
                for line in lines:
                    if line:  # an empty one only answers a heartbeat
                        self._on_commands(Commands(**json.loads(line)))
        except OSError:
            pass
        self.ended = True
        self._socket.close()
        self._on_commands(None)


def _line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"
