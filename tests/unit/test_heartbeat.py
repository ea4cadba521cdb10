"""Both ends of a heartbeat channel, over real sockets; in between them a cable that can be cut."""

import asyncio
import contextlib
import json
import queue
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from steadfast.orchestration.heartbeat import (
    Access,
    Commands,
    HeartbeatClient,
    HeartbeatServer,
    Silence,
    _proof,
    answer_line,
)
from steadfast.world.timeouts import Timeouts

TIMEOUTS = Timeouts(silence_s=0.25)
SOON_S = 10.0
GAP_S = 1.5


class Cable:
    """Forwards what is said between two ends until it is cut: then nothing arrives, and nobody is told."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._far = socket.create_connection(("127.0.0.1", port))
        self.cut = threading.Event()
        threading.Thread(target=self._connect, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def _connect(self) -> None:
        self._near, _ = self._listener.accept()
        for source, target in ((self._near, self._far), (self._far, self._near)):
            threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    def close(self) -> None:
        """End both ends, whose threads then end too."""
        for end in (self._near, self._far):
            with contextlib.suppress(OSError):  # the other end has gone before
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._listener.close()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the other end has gone before
            while said := source.recv(4096):
                if not self.cut.is_set():
                    target.sendall(said)
            if not self.cut.is_set():
                target.shutdown(socket.SHUT_WR)


@dataclass
class Ends:
    """heard: commands that reached the worker, None at its end. lost: what the coordinator was told of members."""

    loop: asyncio.AbstractEventLoop
    server: HeartbeatServer
    port: int
    client: HeartbeatClient
    cable: Cable
    heard: queue.Queue[Commands | None]
    lost: queue.Queue[tuple[str, str]]
    unhandled: list[dict[str, Any]]

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.loop.call_soon_threadsafe(function, *arguments)

    def join(self, name: str, address: str = "127.0.0.1") -> HeartbeatClient:
        met = threading.Event()
        access = Access((address, self.port), name, self.server.admit(name))
        client = HeartbeatClient(access, TIMEOUTS, dict, lambda _: met.set())
        assert met.wait(SOON_S)
        return client


@pytest.fixture
def ends() -> Iterator[Ends]:
    loop = asyncio.new_event_loop()
    unhandled: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: unhandled.append(context))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    heard: queue.Queue[Commands | None] = queue.Queue()
    lost: queue.Queue[tuple[str, str]] = queue.Queue()
    server = HeartbeatServer(TIMEOUTS, lambda *_: None, lambda *said: lost.put(said))
    port = asyncio.run_coroutine_threadsafe(server.listen("127.0.0.1"), loop).result()
    cable = Cable(port)
    client = HeartbeatClient(Access(("127.0.0.1", cable.port), "a", server.admit("a")), TIMEOUTS, dict, heard.put)
    assert heard.get(timeout=SOON_S) == Commands()  # the ends have met
    yield Ends(loop, server, port, client, cable, heard, lost, unhandled)
    assert unhandled == []
    client.close()
    cable.close()
    asyncio.run_coroutine_threadsafe(_end(server), loop).result(SOON_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(SOON_S)
    loop.close()


async def _end(server: HeartbeatServer) -> None:
    server._server.close()
    server._watching.cancel()
    for connection in (*server._peers.values(), *server._strangers):
        connection.transport.abort()
    for _ in range(3):  # in which the loop closes the sockets
        await asyncio.sleep(0)


def is_silence(lost: tuple[str, str], least_s: float) -> bool:
    name, cause = lost
    words = cause.split()
    return name == "a" and words[:4] == ["not", "heard", "of", "for"] and float(words[4]) >= least_s


def test_an_idle_channel_lives_on_and_carries_each_command_once(ends: Ends) -> None:
    time.sleep(1.1 * TIMEOUTS.lease_s)
    assert ends.lost.empty(), ends.lost.get()
    for leave in (3, 3, 4):
        ends.call(partial(ends.server.command, leave=leave))
    assert [ends.heard.get(timeout=SOON_S) for _ in range(2)] == [Commands(leave=3), Commands(leave=4)]
    assert ends.lost.empty()


def test_behind_a_partition_the_worker_is_taken_for_dead_and_then_counts_itself_out(ends: Ends) -> None:
    ends.loop.call_soon_threadsafe(ends.server.expect, ["a"])
    ends.cable.cut.set()
    assert is_silence(ends.lost.get(timeout=SOON_S), TIMEOUTS.silence_s)
    assert ends.heard.empty()  # first the others go on without it
    assert ends.heard.get(timeout=SOON_S) is None
    assert ends.client.ended


def test_before_its_first_world_a_worker_may_be_silent_for_longer_and_in_one_no_more(ends: Ends) -> None:
    ends.cable.cut.set()
    with pytest.raises(queue.Empty):
        ends.lost.get(timeout=4 * TIMEOUTS.silence_s)
    ends.loop.call_soon_threadsafe(ends.server.expect, ["a"])
    lost = ends.lost.get(timeout=SOON_S)
    assert is_silence(lost, 3 * TIMEOUTS.silence_s)
    assert not is_silence(lost, 0.9 * TIMEOUTS.lease_s)


def test_a_worker_that_never_comes_to_a_world_is_lost_in_the_end(ends: Ends) -> None:
    ends.cable.cut.set()
    assert is_silence(ends.lost.get(timeout=SOON_S), TIMEOUTS.lease_s)


def test_a_worker_that_closes_its_end_is_lost_by_that_and_not_by_its_silence(ends: Ends) -> None:
    ends.client.close()
    assert ends.lost.get(timeout=SOON_S) == ("a", "connection closed")


def test_a_coordinator_that_was_stopped_reads_what_came_meanwhile_before_it_judges_anybody(ends: Ends) -> None:
    ends.call(ends.server.expect, ["a"])
    time.sleep(2 * TIMEOUTS.heartbeat_s)
    ends.call(time.sleep, 6 * TIMEOUTS.silence_s)  # its event loop waits for something else
    time.sleep(8 * TIMEOUTS.silence_s)
    assert ends.lost.empty()
    assert not ends.client.ended


def test_after_such_a_gap_everybody_is_given_the_time_again(ends: Ends) -> None:
    ends.call(ends.server.expect, ["a"])
    ends.cable.cut.set()
    ends.call(time.sleep, GAP_S)
    time.sleep(GAP_S)
    began = time.monotonic()
    assert ends.lost.get(timeout=SOON_S)[0] == "a"
    assert time.monotonic() - began > 0.9 * TIMEOUTS.silence_s


def test_how_long_a_silent_worker_may_be_so_is_asked_with_what_is_known_of_it(ends: Ends) -> None:
    asked: list[tuple[str, Silence]] = []

    def patience(name: str, silence: Silence) -> float:
        asked.append((name, silence))
        return 3 * TIMEOUTS.silence_s

    other = ends.join("b")
    ends.server._patience = patience
    ends.call(ends.server.expect, ["a", "b"])
    ends.cable.cut.set()
    assert is_silence(ends.lost.get(timeout=SOON_S), 3 * TIMEOUTS.silence_s)
    other.close()
    assert {name for name, _ in asked} == {"a"}
    assert all(TIMEOUTS.silence_s <= silence.seconds < 4 * TIMEOUTS.silence_s for _, silence in asked)
    assert not any(silence.nobody_heard for _, silence in asked)
    assert all(silence.answers for _, silence in asked)  # the kernel of the cable does


ANSWERS_OF_STRANGERS = [
    b"",
    b"\n\n",
    b"\xff\xfe\n",
    b"deadbeef\n",
    b"a\n",  # a worker's name, without the secret
    b"a " + b"0" * 64 + b"\n",
    "a ünï\n".encode(),  # hmac takes strings of ASCII only
    b"/../../../../tmp/x " + b"0" * 64 + b"\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"x" * 2**21,
    b"[" * 100_000 + b"\n",
    b"a\0b c\n",
]


def test_strangers_are_no_workers_and_disturb_none(ends: Ends) -> None:
    ends.call(ends.server.expect, ["a"])
    half_open = [socket.create_connection(("127.0.0.1", ends.port)) for _ in range(1000)]
    for number in range(1000):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", ends.port)) as stranger:
            stranger.sendall(ANSWERS_OF_STRANGERS[number % len(ANSWERS_OF_STRANGERS)])
        if number % 100 == 50:
            ends.join("b").close()
            assert ends.lost.get(timeout=SOON_S)[0] == "b"
    newcomer = ends.join("b")
    time.sleep(2 * TIMEOUTS.silence_s)
    assert ends.lost.empty()
    assert not ends.client.ended
    assert not newcomer.ended
    assert set(ends.server._peers) == {"a", "b"}
    assert len(ends.server._strangers) <= 128
    newcomer.close()
    for stranger in half_open:
        stranger.close()
    assert ends.lost.get(timeout=SOON_S)[0] == "b"


def test_who_does_not_say_who_he_is_is_cut_off(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadfast.orchestration.heartbeat._HELLO_S", 0.2)
    with stranger_at(ends.port) as (stranger, _), contextlib.suppress(ConnectionResetError):
        assert stranger.recv(100) == b""


@contextlib.contextmanager
def stranger_at(port: int) -> Iterator[tuple[socket.socket, str]]:
    """Connect to a server. Yield the connection and the server's challenge."""
    with socket.create_connection(("127.0.0.1", port), timeout=SOON_S) as stranger:
        yield stranger, stranger.recv(100).decode().strip()


def test_only_who_has_been_announced_and_not_been_lost_is_let_in(ends: Ends) -> None:
    """Though it knows the secret: b has been taken for dead, and of c nobody has spoken."""
    ends.join("b").close()
    assert ends.lost.get(timeout=SOON_S)[0] == "b"
    for name in "bc":
        with stranger_at(ends.port) as (stranger, challenge):
            stranger.sendall(f"{name} {_proof(ends.server._secret, challenge, name)}\n".encode())
            assert stranger.recv(100) == b""
    assert ends.lost.empty()
    with pytest.raises(ValueError, match="is no name of a worker"):
        ends.server.admit("../x")
    # What has proved a name once proves nothing to another challenge.
    secret = ends.server.admit("b")
    with stranger_at(ends.port) as (_, overheard), stranger_at(ends.port) as (stranger, challenge):
        assert len(challenge) == 32
        stranger.sendall(f"b {_proof(secret, overheard, 'b')}\n".encode())
        assert stranger.recv(100) == b""


@pytest.mark.parametrize("said", [b"5\n", b"null\n", b"{\n", b"[" * 100_000 + b"\n"])
def test_a_worker_that_says_what_is_no_message_is_lost(ends: Ends, said: bytes) -> None:
    ends.server._on_message = lambda _, message: message.clear()
    client = ends.join("b")
    with contextlib.suppress(OSError):
        client._socket.sendall(said)
    name, cause = ends.lost.get(timeout=SOON_S)
    assert name == "b"
    assert cause.startswith("the worker sent no valid message")
    client.close()


def test_of_a_worker_whose_line_does_not_end_no_more_is_kept(ends: Ends) -> None:
    secret = ends.server.admit("b")
    with stranger_at(ends.port) as (worker, challenge):  # sends no heartbeats, which would end the line
        worker.sendall(f"b {_proof(secret, challenge, 'b')}\n".encode())
        with contextlib.suppress(OSError):
            worker.sendall(b"x" * (2**20 + 2**13))
        cause = "the worker sent no valid message: ValueError('more than 1048576 bytes in a line')"
        assert ends.lost.get(timeout=SOON_S) == ("b", cause)


def test_a_worker_that_connects_again_is_not_lost(ends: Ends) -> None:
    first = ends.join("b")
    second = ends.join("b")
    time.sleep(2 * TIMEOUTS.silence_s)
    assert ends.lost.empty()
    assert first.ended
    assert not second.ended
    second.close()
    assert ends.lost.get(timeout=SOON_S)[0] == "b"


def test_probes_do_not_keep_a_worker_from_sending_heartbeats(ends: Ends) -> None:
    async def probe() -> None:
        while True:
            ends.server._peers["a"].transport.write(b"\n")
            await asyncio.sleep(TIMEOUTS.heartbeat_s / 5)

    ends.call(ends.server.expect, ["a"])
    probing = asyncio.run_coroutine_threadsafe(probe(), ends.loop)
    with pytest.raises(queue.Empty):
        ends.lost.get(timeout=4 * TIMEOUTS.silence_s)
    probing.cancel()


def test_a_client_goes_over_to_the_next_server_and_is_told_its_commands(ends: Ends) -> None:
    lost: queue.Queue[tuple[str, str]] = queue.Queue()
    next_server = HeartbeatServer(TIMEOUTS, lambda *_: None, lambda *said: lost.put(said))
    next_server.commands = Commands(leave=7)
    port = asyncio.run_coroutine_threadsafe(next_server.listen("127.0.0.1"), ends.loop).result()
    refused = iter([1, port])  # nobody listens there yet, and then somebody does
    secret = next_server.admit("a")
    ends.client._find_again = lambda _: Access(("127.0.0.1", next(refused)), "a", secret)
    ends.cable.close()  # as the end of the first server's process does
    assert ends.heard.get(timeout=SOON_S) == Commands(leave=7)
    assert not ends.client.ended
    ends.client.close()
    assert lost.get(timeout=SOON_S)[0] == "a"
    ends.call(next_server._server.close)
    ends.call(next_server._watching.cancel)


def test_an_answer_reaches_a_worker_also_after_a_lost_connection_and_is_gone_with_the_worker(ends: Ends) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    ends.client._on_answer = answers.put
    ends.call(ends.server.answer, "a", answer_line({"rank": 1}))
    assert answers.get(timeout=SOON_S) == {"rank": 1}
    assert ends.heard.empty()  # it is no command
    # The worker comes again before the server has seen the end of the former connection.
    again: queue.Queue[Any] = queue.Queue()
    access = Access(("127.0.0.1", ends.port), "a", ends.server.admit("a"))
    client = HeartbeatClient(access, TIMEOUTS, dict, lambda _: None, again.put)
    assert again.get(timeout=SOON_S) == {"rank": 1}
    client.close()
    assert ends.lost.get(timeout=SOON_S)[0] == "a"
    ends.call(ends.server.answer, "a", answer_line("released"))
    assert asyncio.run_coroutine_threadsafe(asyncio.sleep(0, ends.server._answers), ends.loop).result() == {}


@pytest.mark.parametrize("in_time", [False, True])
def test_a_client_that_nobody_wants_back_counts_itself_out(ends: Ends, in_time: bool) -> None:
    ends.client._find_again = lambda _: None if in_time else Access(("127.0.0.1", 1), "a", "")
    began = time.monotonic()
    ends.cable.close()
    assert ends.heard.get(timeout=SOON_S) is None
    assert ends.client.ended
    assert (time.monotonic() - began < TIMEOUTS.lease_s / 2) == in_time


ALONE = ["unshare", "--map-root-user", "--net"]  # a network of its own, without being root


def test_a_machine_that_answers_no_more_is_told_from_a_process_that_is_stopped() -> None:
    if not shutil.which("ip") or subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs ip, and a kernel that lets everybody have a network of his own")
    command = [*ALONE, sys.executable, "-m", "tests.unit.partition"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(done.stdout)
    assert (found["stopped"], found["cut off"]) == (True, False)
    assert found["cause"].startswith("not heard of for 1.")
