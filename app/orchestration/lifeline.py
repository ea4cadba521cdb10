"""The lifeline: one socket between each worker and the coordinator. While it is open, the worker lives.

A process that dies closes it, which the other end knows within milliseconds; one that falls silent (a machine without
power, a stopped process) is missed by its heartbeats. Downwards go the orders, so that a worker asks nobody for them;
upwards each heartbeat says how far the worker is. Every message is one line of JSON. The answer to a heartbeat is an
empty line: a worker that misses it is cut off from the others, and must not go on by itself.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from app.timeouts import Timeouts

Message = dict[str, Any]
_LONGEST_LINE_BYTES = 2**20  # the stacks of a process, at most
_ANSWER = b"\n"


@dataclass(frozen=True)
class Orders:
    """What the coordinator wants of the workers: all of it each time, so that a later one makes an earlier one void.

    leave: the attempt to end at an agreed step. save: the one to write a checkpoint before it ends. dump: the one in
    which nobody gets on, and everybody is to say where it is. aborted: the one that lost a member. 0 is none.
    """

    stop: bool = False
    leave: int = 0
    save: int = 0
    dump: int = 0
    aborted: int = 0


class Lifelines:
    """The coordinator's ends, in its event loop.

    Args:
        silence_s: a worker that has not been heard of for so long is dead.
        heard: is given each member's messages.
        lost: is told of each member whose lifeline ended, once, and why.
    """

    def __init__(
        self, silence_s: float, heard: Callable[[str, Message], None], lost: Callable[[str, str], None]
    ) -> None:
        self._silence_s, self._heard, self._lost = silence_s, heard, lost
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._orders = Orders()

    async def listen(self) -> int:
        """Returns the port."""
        self._server = await asyncio.start_server(self._hold, "0.0.0.0", 0, limit=_LONGEST_LINE_BYTES)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def order(self, orders: Orders) -> None:
        """Tells every worker, also those that come later."""
        self._orders = orders
        for writer in self._writers.values():
            writer.write(_line(asdict(orders)))

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        member = (await reader.readline()).decode().strip()
        self._writers[member] = writer
        writer.write(_line(asdict(self._orders)))
        cause = "connection closed"
        try:
            while line := await asyncio.wait_for(reader.readline(), self._silence_s):
                self._heard(member, json.loads(line))
                writer.write(_ANSWER)
        except TimeoutError:
            cause = f"not heard of for {self._silence_s:g} s"
        except OSError as error:
            cause = str(error)
        except ValueError:  # the last line of a dying worker may be half a message
            pass
        finally:
            del self._writers[member]
            writer.close()
            self._lost(member, cause)


class Lifeline:
    """A worker's end, with a thread of its own.

    Args:
        beat: what each heartbeat says.
        heard: is called with each order, on that thread; with None when the coordinator is gone.

    `ended`: the coordinator is gone, or took this worker for dead.
    """

    def __init__(
        self,
        address: tuple[str, int],
        member: str,
        timeouts: Timeouts,
        beat: Callable[[], Message],
        heard: Callable[[Orders | None], None],
    ) -> None:
        self._socket = socket.create_connection(address, timeout=timeouts.form.total_seconds())
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(f"{member}\n".encode())
        self._socket.settimeout(timeouts.beat_s)
        self._beat, self._heard, self._lease_s = beat, heard, timeouts.lease_s
        self.ended = False
        threading.Thread(target=self._listen, daemon=True, name="lifeline").start()

    @property
    def own_address(self) -> str:
        """Of the interface that leads to the coordinator."""
        return str(self._socket.getsockname()[0])

    def say(self, message: Message) -> None:
        """Between two heartbeats. On the thread that `heard` is called on."""
        self._socket.sendall(_line(message))

    def close(self) -> None:
        self._socket.close()

    def _listen(self) -> None:
        unread, heard_s = b"", time.monotonic()
        try:
            while time.monotonic() - heard_s < self._lease_s:
                try:
                    received = self._socket.recv(4096)
                except TimeoutError:
                    self.say(self._beat())
                    continue
                if not received:
                    break
                heard_s = time.monotonic()
                *lines, unread = (unread + received).split(b"\n")
                for line in filter(None, lines):
                    self._heard(Orders(**json.loads(line)))
        except OSError:
            pass
        self.ended = True
        self._socket.close()
        self._heard(None)


def _line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"
