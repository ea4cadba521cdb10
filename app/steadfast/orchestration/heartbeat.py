"""Heartbeats: one connection between each worker and the coordinator.

Workers send heartbeats with their progress, and the coordinator sends commands and answers to workers that wait for a
world. A worker is alive while its connection is open and heartbeats arrive.
"""

# The connection of a dying process closes, which the coordinator notices within milliseconds. A machine without power
# or a stopped process closes nothing, and is noticed by its missing heartbeats. The coordinator sends commands over the
# same connection, so that no worker has to poll for commands. A message is one line of JSON.
#
# A worker receives a secret through Ray, and proves its knowledge by an HMAC over its name and a challenge from the
# server. So another process that reaches the port cannot act as a worker, and cannot learn the secret.
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
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from steadfast.liveness.lateness import Lateness
from steadfast.run.events import CONNECTION_CLOSED
from steadfast.world.timeouts import Timeouts

Message = dict[str, Any]
_LONGEST_LINE_BYTES = 2**20  # the longest message holds the stacks of a process
_LONGEST_INTRODUCTION_BYTES = 2**12
_CHUNK_BYTES = 2**12  # most bytes that a worker receives at once
_NAME = re.compile("[0-9a-f]{1,8}")  # strict, because the name becomes part of a file's name
_STRANGERS = 128  # limit of connections without an introduction; a further one replaces the oldest
_HELLO_S = 10.0  # time for a new connection to introduce itself
_BACKLOG = 1024
_ACKNOWLEDGED_S = 0.5  # the kernel of a live machine acknowledges data within this time


@dataclass(frozen=True)
class Commands:
    """Commands of the coordinator to all workers.

    Each message holds all commands, so the newest message replaces the earlier ones.
    """

    stop: bool = False
    # Each of these is the number of the attempt that the command applies to, 0 for none.
    leave: int = 0  # end the attempt at a step that its ranks agree on
    save: int = 0  # write a checkpoint before the attempt ends
    dump: int = 0  # send stacks, because the attempt hangs
    aborted: int = 0  # end the attempt at once, because it has lost a member or hangs


class Access(NamedTuple):
    """Address, name and secret with which a worker connects to the heartbeat server."""

    address: tuple[str, int]
    name: str
    secret: str  # of the coordinator, which sends it to the worker through Ray


@dataclass(frozen=True)
class Silence:
    """Silence of a worker in a world, longer than `silence_s`."""

    seconds: float
    answers: bool  # whether the worker's machine acknowledges data, so that only the process is silent
    nobody_heard: bool  # whether all workers of the world are silent
    stretch: float  # factor for time limits, from the load of this machine


class _Connection(asyncio.BufferedProtocol):
    """Connection to a worker, or to a stranger that has not introduced itself."""

    # Each connection empties the buffer at once, so all connections share one.
    _buffer = memoryview(bytearray(2**16))
    transport: asyncio.Transport

    def __init__(self, server: "HeartbeatServer") -> None:
        self._server = server
        self._unread = b""
        self.challenge = secrets.token_hex(16)
        self.name = ""  # of the worker, "" for a stranger
        self.silent_s = 0.0
        self.acknowledged_s = 0.0  # time of the last acknowledgment
        self.unanswered_s = 0.0  # time for which the worker's machine has not acknowledged all data
        self.lost = ""  # reason why the worker is declared dead

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.transport.write(f"{self.challenge}\n".encode())
        self._server.greet(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        *lines, self._unread = (self._unread + self._buffer[:nbytes]).split(b"\n")
        for line in lines:
            if self.transport.is_closing():
                return
            if self.name:
                self._receive(line)
            else:
                self._server.introduce(self, line)
        longest = _LONGEST_LINE_BYTES if self.name else _LONGEST_INTRODUCTION_BYTES
        if len(self._unread) > longest:
            self._refuse(ValueError(f"more than {longest} bytes in a line"))

    def _receive(self, line: bytes) -> None:
        self.silent_s = 0.0
        try:
            self._server.hear(self, json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        self.lost = self.lost or f"the worker sent no valid message: {error!r:.200}"
        self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        # A process that is killed may leave data unread, and its kernel then resets the connection.
        cause = str(error) if error and not isinstance(error, ConnectionResetError) else CONNECTION_CLOSED
        self._server.ended(self, self.lost or cause)


class HeartbeatServer:
    """Server that receives heartbeats, sends commands and detects lost workers.

    The server runs in the coordinator's event loop.

    Args:
        on_message: called with a worker's name and each message of that worker.
        on_lost: called once for each lost worker, with its name and the cause. A worker is lost when its connection
            ends or when the worker is silent for too long.
        patience: returns the seconds that a worker of a world may be silent. It is called at every check of a worker
            that is silent for `silence_s`.
    """

    def __init__(
        self,
        timeouts: Timeouts,
        on_message: Callable[[str, Message], None],
        on_lost: Callable[[str, str], None],
        patience: Callable[[str, Silence], float] | None = None,
    ) -> None:
        self.commands = Commands()  # newest commands, which a worker also receives when it connects
        self._timeouts = timeouts
        self._on_message = on_message
        self._on_lost = on_lost
        self._patience = patience or (lambda _, silence: timeouts.silence_s * silence.stretch)
        self._secret = secrets.token_hex(16)
        self._admitted: set[str] = set()
        # Connection without an introduction -> its age in seconds, oldest first.
        self._strangers: dict[_Connection, float] = {}
        self._peers: dict[str, _Connection] = {}
        # Newest answer to each worker, which a worker also receives when it connects.
        self._answers: dict[str, bytes] = {}
        self._in_world: set[str] = set()

    async def listen(self, host: str) -> int:
        """Listen for workers on one address of this machine. Return the port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), host, 0, backlog=_BACKLOG)
        self._watching = asyncio.ensure_future(self._watch())
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def admit(self, name: str) -> str:
        """Admit a worker, and return the secret for its introduction.

        Raises ValueError if `name` is not one to eight lower-case hexadecimal digits.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a worker")
        self._admitted.add(name)
        return self._secret

    def command(self, **changes: Any) -> None:
        """Change some commands, and send all commands to every worker if one has changed."""
        commands = replace(self.commands, **changes)
        if commands == self.commands:
            return
        self.commands = commands
        for peer in self._peers.values():
            peer.transport.write(_line_of(commands))

    def answer(self, name: str, line: bytes) -> None:
        """Send a worker a line of `answer_line`. A worker that is lost meanwhile gets no answer."""
        if name in self._admitted:
            self._answers[name] = line
            if peer := self._peers.get(name):
                peer.transport.write(line)

    def expect(self, names: Iterable[str]) -> None:
        """Apply the short limit `silence_s` to these workers.

        The workers are in a world now, so other ranks wait for them.
        """
        self._in_world.update(names)

    # Calls of the connections.

    def greet(self, stranger: _Connection) -> None:
        if len(self._strangers) >= _STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        self._strangers[stranger] = 0.0

    def introduce(self, stranger: _Connection, line: bytes) -> None:
        """Make a stranger a worker, or end the connection if the introduction is wrong."""
        self._strangers.pop(stranger, None)
        words = line.decode(errors="replace").split()
        if len(words) != 2 or words[0] not in self._admitted:
            stranger.transport.abort()
            return
        name, proof = words
        # compare_digest raises TypeError for strings that are not ASCII, so it compares bytes.
        if not hmac.compare_digest(proof.encode(), _proof(self._secret, stranger.challenge, name).encode()):
            stranger.transport.abort()
            return
        stranger.name = name
        former = self._peers.get(name)
        self._peers[name] = stranger
        if former is not None:
            former.transport.abort()
        stranger.transport.write(_line_of(self.commands) + self._answers.get(name, b""))

    def hear(self, peer: _Connection, message: Message) -> None:
        self._on_message(peer.name, message)
        # A worker needs a sign of life much more rarely than it sends one, and each write is a system call.
        now_s = time.monotonic()
        if now_s - peer.acknowledged_s >= self._timeouts.acknowledge_s:
            peer.acknowledged_s = now_s
            peer.transport.write(b"\n")

    def ended(self, connection: _Connection, cause: str) -> None:
        self._strangers.pop(connection, None)
        name = connection.name
        if name and self._peers.get(name) is connection:  # otherwise the worker has connected again
            del self._peers[name]
            self._in_world.discard(name)
            self._admitted.discard(name)
            self._answers.pop(name, None)
            self._on_lost(name, cause)

    async def _watch(self) -> None:
        # Silence is counted in checks of this loop. If this process was stopped, or blocked its event loop, that time
        # does not count as a worker's silence: heartbeats that arrived meanwhile must be read first.
        lateness = Lateness(min(0.25, self._timeouts.silence_s / 10))
        while True:
            lateness.begin()
            await asyncio.sleep(lateness.interval_s)
            watched_s, gap = lateness.woke()
            for stranger in list(self._strangers):
                self._strangers[stranger] += watched_s
                if self._strangers[stranger] > _HELLO_S:
                    stranger.transport.abort()
            late_s = 1.5 * self._timeouts.heartbeat_of(len(self._peers))
            for peer in self._peers.values():
                peer.silent_s = 0.0 if gap else peer.silent_s + watched_s
                self._probe(peer, watched_s, late_s)
            self._judge(lateness.stretch)

    def _probe(self, peer: _Connection, watched_s: float, late_s: float) -> None:
        # The kernel of a machine acknowledges data even for a stopped process. A machine without power or network does
        # not. So a silent worker's machine gets a byte to acknowledge.
        if peer.silent_s < late_s:
            peer.unanswered_s = 0.0
        elif _num_unanswered_bytes(peer.transport):
            peer.unanswered_s += watched_s
        else:
            peer.unanswered_s = 0.0
            peer.transport.write(b"\n")

    def _judge(self, stretch: float) -> None:
        silence_s = self._timeouts.silence_s
        heard = {name for name, peer in self._peers.items() if peer.silent_s < silence_s}
        nobody_heard = not heard & self._in_world
        for name, peer in self._peers.items():
            if name in heard or peer.lost:
                continue
            # Outside of a world the limit is long: on a busy machine a worker that imports libraries and builds its
            # model may delay its own heartbeats.
            limit_s = self._timeouts.lease_s
            if name in self._in_world:
                answers = peer.unanswered_s < max(_ACKNOWLEDGED_S, silence_s / 2)
                limit_s = self._patience(name, Silence(peer.silent_s, answers, nobody_heard, stretch))
            if peer.silent_s >= limit_s:
                peer.lost = f"not heard of for {peer.silent_s:.3g} s"
                peer.transport.abort()


class HeartbeatClient:
    """Client that sends a worker's heartbeats and receives commands.

    The client has a thread of its own.

    Args:
        beat: returns the content of a heartbeat.
        on_commands: called with each message of commands, and with None when no more commands can arrive.
        on_answer: called with the content of each answer. The server repeats the newest answer when a worker connects
            again.
        find_again: called when the connection has ended, with the seconds that are left for the call. It returns the
            access to the coordinator's successor, or None if the successor goes on without this worker.

    The thread of the client calls all four functions.
    """

    def __init__(
        self,
        access: Access,
        timeouts: Timeouts,
        beat: Callable[[], Message],
        on_commands: Callable[[Commands | None], None],
        on_answer: Callable[[Any], None] = lambda _: None,
        find_again: Callable[[float], Access | None] = lambda _: None,
    ) -> None:
        self.ended = False  # whether the coordinator is lost, or has declared this worker dead
        self._beat = beat
        self._on_commands = on_commands
        self._on_answer = on_answer
        self._find_again = find_again
        self._timeouts = timeouts
        self._lateness = Lateness(timeouts.heartbeat_s)
        self._closing = threading.Event()
        self._unheard_s = 0.0  # time since the last message of the coordinator
        self._socket = self._connect(access)
        self.own_address = str(self._socket.getsockname()[0])  # address of the interface that reaches the coordinator
        threading.Thread(target=self._run, daemon=True, name="heartbeat").start()

    def adapt_to(self, world_size: int) -> None:
        """Send heartbeats as often as in a world of this size. Only `on_answer` may call this."""
        interval_s = self._timeouts.heartbeat_of(world_size)
        if interval_s != self._lateness.interval_s:
            self._lateness = Lateness(interval_s)

    def send(self, message: Message) -> None:
        """Send a message between two heartbeats. Only `on_commands` may call this."""
        self._socket.sendall(_line(message))

    def close(self) -> None:
        self._closing.set()
        self._socket.close()

    def _connect(self, access: Access) -> socket.socket:
        connection = socket.create_connection(access.address, timeout=self._timeouts.form.total_seconds())
        # A heartbeat is small, and must not wait for more data in the kernel.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._access = access
        self._unheard_s = 0.0
        return connection

    def _run(self) -> None:
        self._converse()
        # Ray restarts a coordinator that has died, and the current world trains on meanwhile.
        while self._reconnect():
            self._converse()
        self.ended = True
        self._socket.close()
        self._on_commands(None)

    def _converse(self) -> None:
        """Send heartbeats and receive commands until the connection ends.

        The connection also counts as ended if nothing arrives for `lease_s`.
        """
        with contextlib.suppress(OSError):
            unread = self._introduce()
            due_s = self._begin_interval()
            # The server acknowledges heartbeats. A worker that hears nothing is cut off from the coordinator, which
            # declares this worker dead. The other workers go on without this worker, so it must not train alone. Time
            # in which this process was stopped does not count, because the messages of that time are still unread.
            while self._unheard_s < self._timeouts.lease_s:
                wait_s = due_s - time.monotonic()
                if wait_s <= 0:
                    self._unheard_s += self._lateness.woke()[0]
                    self.send({**self._beat(), "stretch": round(self._lateness.stretch, 2)})
                    due_s = self._begin_interval()
                    continue
                # The wait is only the rest of the interval, so that incoming data does not delay the next heartbeat.
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
                    if line:  # an empty line only acknowledges heartbeats
                        self._receive(json.loads(line))

    def _receive(self, message: Message) -> None:
        if "answer" in message:
            self._on_answer(message["answer"])
        else:
            self._on_commands(Commands(**message))

    def _introduce(self) -> bytes:
        """Answer the server's challenge. Return the bytes received after the challenge."""
        self._socket.settimeout(self._timeouts.lease_s)  # long, because a server may be stopped for a while
        said = b""
        while b"\n" not in said:
            received = self._socket.recv(_CHUNK_BYTES)
            if not received:
                raise ConnectionError
            said += received
        challenge, _, unread = said.partition(b"\n")
        proof = _proof(self._access.secret, challenge.decode(), self._access.name)
        self._socket.sendall(f"{self._access.name} {proof}\n".encode())
        return unread

    def _begin_interval(self) -> float:
        """Begin an interval, and return the time of the next heartbeat."""
        self._lateness.begin()
        return time.monotonic() + self._lateness.interval_s

    def _reconnect(self) -> bool:
        """Connect to the coordinator's successor.

        Return False if no successor answers in time, or if the successor goes on without this worker.
        """
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


def answer_line(answer: Any) -> bytes:
    """Return the line for `HeartbeatServer.answer` with a JSON value."""
    return _line({"answer": answer})


def _num_unanswered_bytes(transport: asyncio.Transport) -> int:
    """Return how many sent bytes the peer's machine has not acknowledged."""
    with contextlib.suppress(OSError, ValueError):  # the connection may be closed meanwhile
        descriptor = transport.get_extra_info("socket").fileno()
        (num_bytes,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))
        return int(num_bytes)
    return 1


def _proof(secret: str, challenge: str, name: str) -> str:
    return hmac.digest(secret.encode(), f"{challenge} {name}".encode(), "sha256").hex()


def _line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


@lru_cache(maxsize=1)  # all workers get the same line
def _line_of(commands: Commands) -> bytes:
    return _line(asdict(commands))
