"""The heartbeat channel: one connection between each worker and the coordinator. While it is open, the worker lives."""

# A process that dies closes it, which the coordinator notices within milliseconds. One that falls silent (a machine
# without power, a stopped process) is noticed by its missing heartbeats, which also say how far a worker is. The
# coordinator sends its commands the other way, so that no worker has to ask for them. A message is one line of JSON.
#
# Who connects proves that it knows the secret that workers are told through Ray, by an HMAC over its name and what the
# server has sent. So a stranger who reaches the port is no worker, and learns nothing to be one by.
import asyncio
import contextlib
import fcntl
import hmac
import json
import re
import secrets
import socket
import struct
import termios
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from app.world.lateness import Lateness
from app.world.timeouts import Timeouts

Message = dict[str, Any]
_LONGEST_LINE_BYTES = 2**20  # the stacks of a process, at most
_CHUNK_BYTES = 2**12  # no connection holds more than twice this that nobody has asked for
_NAME = re.compile("[0-9a-f]{1,8}")  # also becomes part of a file's name
_STRANGERS = 128  # connections that have not said yet who they are; of more, the oldest goes
_HELLO_S = 10.0  # in which they must
_BACKLOG = 1024
_ACKNOWLEDGED_S = 0.5  # a machine that lives acknowledges what it is sent within this


@dataclass(frozen=True)
class Commands:
    """What the coordinator tells all workers: everything each time, so that a newer one replaces all before it."""

    stop: bool = False
    # The number of an attempt, 0 for none.
    leave: int = 0  # to end at an agreed step
    save: int = 0  # to write a checkpoint before it ends
    dump: int = 0  # to send stacks, since it is stuck
    aborted: int = 0  # to end at once, since it has lost a member


class Access(NamedTuple):
    """What a worker needs to send heartbeats."""

    address: tuple[str, int]
    secret: str


@dataclass(frozen=True)
class Silence:
    """What is known of a worker in a world that has not been heard of for `silence_s`."""

    seconds: float
    answers: bool  # its machine takes what is sent to it, so only its process is still
    nobody_heard: bool  # nor has anybody else in the world been
    stretch: float  # by the load of this machine


@dataclass
class _Peer:
    writer: asyncio.StreamWriter
    silent_s: float = 0.0
    unanswered_s: float = 0.0  # since its machine has taken all that was sent to it
    lost: str = ""  # why it is taken for dead


class HeartbeatServer:
    """Receive heartbeats, and notice which workers are lost. Lives in the coordinator's event loop."""

    def __init__(
        self,
        timeouts: Timeouts,
        on_message: Callable[[str, Message], None],
        on_lost: Callable[[str, str], None],
        patience: Callable[[str, Silence], float] | None = None,
    ) -> None:
        self.commands = Commands()  # the last ones; workers that connect later are told them too
        self._timeouts = timeouts
        self._on_message = on_message
        # Called once with the name of each worker that is lost, and the cause: its connection has ended, or it has been
        # silent for too long.
        self._on_lost = on_lost
        # Asked at every look for how long a worker in a world may be silent that has been so for `silence_s`.
        self._patience = patience or (lambda _, silence: timeouts.silence_s * silence.stretch)
        self._secret = secrets.token_hex(16)
        self._admitted: set[str] = set()
        self._strangers: dict[asyncio.StreamWriter, float] = {}  # -> seconds since they came; oldest first
        self._peers: dict[str, _Peer] = {}
        self._in_world: set[str] = set()

    async def listen(self, host: str) -> int:
        """Accept workers from now on, on one address of this machine. Return the port."""
        self._server = await asyncio.start_server(self._serve, host, 0, limit=_CHUNK_BYTES, backlog=_BACKLOG)
        self._watching = asyncio.ensure_future(self._watch())
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def admit(self, name: str) -> str:
        """Let the heartbeats of a worker in. Return the secret that it must know."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a worker")
        self._admitted.add(name)
        return self._secret

    def command(self, **changes: Any) -> None:
        """Change some of the commands and send all of them to every worker."""
        self.commands = replace(self.commands, **changes)
        for peer in self._peers.values():
            peer.writer.write(_line(asdict(self.commands)))

    def expect(self, names: Iterable[str]) -> None:
        """Let `silence_s` count for these workers from now on: they are in a world, where others wait for them."""
        self._in_world.update(names)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            name = await self._greet(reader, writer)
            if name is not None:
                await self._follow(name, reader, writer)
        finally:
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str | None:
        """Return the name of the worker at the other end; None for a stranger."""
        if len(self._strangers) >= _STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        self._strangers[writer] = 0.0
        challenge = secrets.token_hex(16)
        try:
            writer.write(f"{challenge}\n".encode())
            words = (await reader.readuntil()).decode().split()
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError):
            return None
        finally:
            self._strangers.pop(writer, None)
        if len(words) != 2 or words[0] not in self._admitted:
            return None
        name, proof = words
        # As bytes, since strings that are not ASCII raise TypeError.
        right = hmac.compare_digest(proof.encode(), _proof(self._secret, challenge, name).encode())
        return name if right else None

    async def _follow(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take the messages of a worker until its connection ends."""
        former = self._peers.get(name)
        peer = self._peers[name] = _Peer(writer)
        if former is not None:
            former.writer.transport.abort()
        writer.write(_line(asdict(self.commands)))
        cause = "connection closed"
        try:
            async for line in _lines(reader):
                peer.silent_s = 0.0
                self._on_message(name, json.loads(line))
                writer.write(b"\n")
        except OSError as error:
            cause = str(error)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            cause = f"what came is no message: {error!r:.200}"
        if self._peers.get(name) is peer:  # or it has come again meanwhile
            del self._peers[name]
            self._in_world.discard(name)
            self._admitted.discard(name)
            self._on_lost(name, peer.lost or cause)

    async def _watch(self) -> None:
        # Time is counted in looks. What this process has slept through (it was stopped, or waited for something else
        # than its sockets) counts for nobody: what they have sent meanwhile is read first.
        lateness = Lateness(min(0.25, self._timeouts.silence_s / 10))
        while True:
            lateness.begin()
            await asyncio.sleep(lateness.interval_s)
            watched_s, gap = lateness.woke()
            for writer in list(self._strangers):
                self._strangers[writer] += watched_s
                if self._strangers[writer] > _HELLO_S:
                    writer.transport.abort()
            for peer in self._peers.values():
                peer.silent_s = 0.0 if gap else peer.silent_s + watched_s
                self._probe(peer, watched_s)
            self._judge(lateness.stretch)

    def _probe(self, peer: _Peer, watched_s: float) -> None:
        # The machine of a stopped process still takes what is sent to it; one without power or network does not.
        if peer.silent_s < 1.5 * self._timeouts.heartbeat_s:
            peer.unanswered_s = 0.0
        elif _num_unanswered_bytes(peer.writer):
            peer.unanswered_s += watched_s
        else:
            peer.unanswered_s = 0.0
            peer.writer.write(b"\n")

    def _judge(self, stretch: float) -> None:
        silence_s = self._timeouts.silence_s
        heard = {name for name, peer in self._peers.items() if peer.silent_s < silence_s}
        nobody_heard = not heard & self._in_world
        for name, peer in self._peers.items():
            if name in heard or peer.lost:
                continue
            # On a busy machine a worker that imports and builds its model may leave its heartbeats no time.
            limit_s = self._timeouts.lease_s
            if name in self._in_world:
                answers = peer.unanswered_s < max(_ACKNOWLEDGED_S, silence_s / 2)
                limit_s = self._patience(name, Silence(peer.silent_s, answers, nobody_heard, stretch))
            if peer.silent_s >= limit_s:
                peer.lost = f"not heard of for {peer.silent_s:.3g} s"
                peer.writer.transport.abort()  # which ends `_follow`


class HeartbeatClient:
    """Send a worker's heartbeats, and pass its commands on. It has a thread of its own.

    Args:
        access: where the coordinator is, and the secret that it has told this worker through Ray.
        find_again: called when the connection has ended, with the seconds that are left: returns where the coordinator
            is by now, or None if it does without this worker.
    """

    def __init__(
        self,
        access: Access,
        member: str,
        timeouts: Timeouts,
        beat: Callable[[], Message],
        on_commands: Callable[[Commands | None], None],
        find_again: Callable[[float], Access | None] = lambda _: None,
    ) -> None:
        self.ended = False  # the coordinator is gone, or takes this worker for dead
        # The thread calls both: one for what a heartbeat says, one with what comes, and None once nothing can come.
        self._beat = beat
        self._on_commands = on_commands
        self._find_again = find_again
        self._member = member
        self._timeouts = timeouts
        self._lateness = Lateness(timeouts.heartbeat_s)
        self._closing = threading.Event()
        self._unheard_s = 0.0  # since the coordinator has been heard of
        self._socket = self._connect(access)
        self.own_address = str(self._socket.getsockname()[0])  # of the interface that leads to the coordinator
        threading.Thread(target=self._run, daemon=True, name="heartbeat").start()

    def send(self, message: Message) -> None:
        """Send a message between two heartbeats; only on the thread that `on_commands` is called on."""
        self._socket.sendall(_line(message))

    def close(self) -> None:
        self._closing.set()
        self._socket.close()

    def _connect(self, access: Access) -> socket.socket:
        connection = socket.create_connection(access.address, timeout=self._timeouts.form.total_seconds())
        # A heartbeat is small, and must not wait until there is more to send.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._secret = access.secret
        self._unheard_s = 0.0
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
        with contextlib.suppress(OSError):
            unread = self._introduce()
            due_s = self._begin_interval()
            # The server answers each heartbeat. A worker that misses the answers is cut off from the others. They take
            # it for dead and go on without it, so it must not go on by itself. What it was stopped for does not count:
            # the answers of that time lie unread.
            while self._unheard_s < self._timeouts.lease_s:
                wait_s = due_s - time.monotonic()
                if wait_s <= 0:
                    self._unheard_s += self._lateness.woke()[0]
                    self.send({**self._beat(), "stretch": round(self._lateness.stretch, 2)})
                    due_s = self._begin_interval()
                    continue
                # Not the whole interval: whatever comes meanwhile must not put the next heartbeat off.
                self._socket.settimeout(wait_s)
                try:
                    received = self._socket.recv(_CHUNK_BYTES)
                except TimeoutError:
                    continue
                if not received:
                    break
                self._unheard_s = 0.0
                *lines, unread = (unread + received).split(b"\n")
                for line in lines:
                    if line:  # an empty one only answers a heartbeat
                        self._on_commands(Commands(**json.loads(line)))

    def _introduce(self) -> bytes:
        """Answer the server's challenge. Return what came behind it."""
        self._socket.settimeout(self._timeouts.lease_s)  # a server that is stopped meanwhile is no reason to give up
        said = b""
        while b"\n" not in said:
            received = self._socket.recv(_CHUNK_BYTES)
            if not received:
                raise ConnectionError
            said += received
        challenge, _, unread = said.partition(b"\n")
        self._socket.sendall(f"{self._member} {_proof(self._secret, challenge.decode(), self._member)}\n".encode())
        return unread

    def _begin_interval(self) -> float:
        """Begin the wait for the next heartbeat. Return when it is due."""
        self._lateness.begin()
        return time.monotonic() + self._lateness.interval_s

    def _reconnect(self) -> bool:
        """Connect to the coordinator's successor. Return False if there is none for this worker, or none in time."""
        self._socket.close()
        until_s = time.monotonic() + self._timeouts.lease_s - self._unheard_s
        while not self._closing.is_set() and (left_s := until_s - time.monotonic()) > 0:
            access = self._find_again(left_s)
            if access is None:
                return False
            with contextlib.suppress(OSError):
                self._socket = self._connect(access)
                return True
            self._closing.wait(self._timeouts.heartbeat_s)
        return False


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines that come. Half a line at the end, the last one of a dying worker, is none.

    Raises:
        ValueError: a line is too long.
    """
    unread = b""
    while received := await reader.read(_CHUNK_BYTES):
        *lines, unread = (unread + received).split(b"\n")
        for line in lines:
            yield line
        if len(unread) > _LONGEST_LINE_BYTES:
            raise ValueError(f"more than {_LONGEST_LINE_BYTES} bytes in a line")


def _num_unanswered_bytes(writer: asyncio.StreamWriter) -> int:
    """Return how much of what was sent the machine at the other end has not acknowledged."""
    with contextlib.suppress(OSError, ValueError):  # closed meanwhile
        descriptor = writer.get_extra_info("socket").fileno()
        (num_bytes,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))
        return int(num_bytes)
    return 1


def _proof(secret: str, challenge: str, name: str) -> str:
    return hmac.digest(secret.encode(), f"{challenge} {name}".encode(), "sha256").hex()


def _line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"
