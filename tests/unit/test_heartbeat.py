"""Both ends of a heartbeat channel, over real sockets; in between them a cable that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from app.orchestration.heartbeat import Commands, HeartbeatClient, HeartbeatServer
from app.world.timeouts import Timeouts

TIMEOUTS = Timeouts(silence_s=0.25)
SOON_S = 10.0


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
    client: HeartbeatClient
    cable: Cable
    heard: queue.Queue[Commands | None]
    lost: queue.Queue[tuple[str, str]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    heard: queue.Queue[Commands | None] = queue.Queue()
    lost: queue.Queue[tuple[str, str]] = queue.Queue()
    server = HeartbeatServer(TIMEOUTS, lambda *_: None, lambda *said: lost.put(said))
    cable = Cable(asyncio.run_coroutine_threadsafe(server.listen(), loop).result())
    client = HeartbeatClient(("127.0.0.1", cable.port), "a", TIMEOUTS, dict, heard.put)
    assert heard.get(timeout=SOON_S) == Commands()  # the ends have met
    yield Ends(loop, server, client, cable, heard, lost)
    client.close()
    cable.close()
    asyncio.run_coroutine_threadsafe(_end(server), loop).result(SOON_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(SOON_S)
    loop.close()


async def _end(server: HeartbeatServer) -> None:
    server._server.close()
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)


def test_an_idle_channel_lives_on_and_carries_commands(ends: Ends) -> None:
    time.sleep(1.1 * TIMEOUTS.lease_s)
    ends.loop.call_soon_threadsafe(lambda: ends.server.command(leave=3))
    assert ends.heard.get(timeout=SOON_S) == Commands(leave=3)
    assert ends.lost.empty()


def test_behind_a_partition_the_worker_is_taken_for_dead_and_then_counts_itself_out(ends: Ends) -> None:
    ends.loop.call_soon_threadsafe(ends.server.expect, ["a"])
    ends.cable.cut.set()
    assert ends.lost.get(timeout=SOON_S) == ("a", "not heard of for 0.25 s")
    assert ends.heard.empty()  # first the others go on without it
    assert ends.heard.get(timeout=SOON_S) is None
    assert ends.client.ended


def test_before_its_first_world_a_worker_may_be_silent_for_longer_and_in_one_no_more(ends: Ends) -> None:
    ends.cable.cut.set()
    with pytest.raises(queue.Empty):
        ends.lost.get(timeout=4 * TIMEOUTS.silence_s)
    ends.loop.call_soon_threadsafe(ends.server.expect, ["a"])
    began = time.monotonic()
    assert ends.lost.get(timeout=SOON_S) == ("a", "not heard of for 0.25 s")
    assert time.monotonic() - began < 2 * TIMEOUTS.silence_s


def test_a_worker_that_never_comes_to_a_world_is_lost_in_the_end(ends: Ends) -> None:
    ends.cable.cut.set()
    assert ends.lost.get(timeout=SOON_S) == ("a", f"not heard of for {TIMEOUTS.lease_s:g} s")


def test_a_worker_that_closes_its_end_is_lost_at_once(ends: Ends) -> None:
    began = time.monotonic()
    ends.client.close()
    assert ends.lost.get(timeout=SOON_S)[0] == "a"
    assert time.monotonic() - began < TIMEOUTS.silence_s


def test_a_client_goes_over_to_the_next_server_and_is_told_its_commands(ends: Ends) -> None:
    lost: queue.Queue[tuple[str, str]] = queue.Queue()
    next_server = HeartbeatServer(TIMEOUTS, lambda *_: None, lambda *said: lost.put(said))
    next_server.commands = Commands(leave=7)
    port = asyncio.run_coroutine_threadsafe(next_server.listen(), ends.loop).result()
    refused = iter([1, port])  # nobody listens there yet, and then somebody does
    ends.client._find_again = lambda _: ("127.0.0.1", next(refused))
    ends.cable.close()  # as the end of the first server's process does
    assert ends.heard.get(timeout=SOON_S) == Commands(leave=7)
    assert not ends.client.ended
    ends.client.close()
    assert lost.get(timeout=SOON_S)[0] == "a"
    ends.loop.call_soon_threadsafe(next_server._server.close)


@pytest.mark.parametrize("in_time", [False, True])
def test_a_client_that_nobody_wants_back_counts_itself_out(ends: Ends, in_time: bool) -> None:
    ends.client._find_again = lambda _: None if in_time else ("127.0.0.1", 1)
    began = time.monotonic()
    ends.cable.close()
    assert ends.heard.get(timeout=SOON_S) is None
    assert ends.client.ended
    assert (time.monotonic() - began < TIMEOUTS.lease_s / 2) == in_time
