"""Both ends of a lifeline, over real sockets; in between them a cable that can be cut."""

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

from app.orchestration.lifeline import Lifeline, Lifelines, Orders
from app.timeouts import Timeouts

TIMEOUTS = Timeouts(silence_s=0.4)
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
        near, _ = self._listener.accept()
        for source, target in ((near, self._far), (self._far, near)):
            threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        while said := source.recv(4096):
            if not self.cut.is_set():
                target.sendall(said)
        with contextlib.suppress(OSError):  # the other end has gone before
            target.shutdown(socket.SHUT_WR)


@dataclass
class Ends:
    """heard: orders that reached the worker, None at its end. lost: what the coordinator was told of members."""

    loop: asyncio.AbstractEventLoop
    lifelines: Lifelines
    lifeline: Lifeline
    cable: Cable
    heard: queue.Queue[Orders | None]
    lost: queue.Queue[tuple[str, str]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    heard: queue.Queue[Orders | None] = queue.Queue()
    lost: queue.Queue[tuple[str, str]] = queue.Queue()
    lifelines = Lifelines(TIMEOUTS.silence_s, lambda *_: None, lambda *said: lost.put(said))
    cable = Cable(asyncio.run_coroutine_threadsafe(lifelines.listen(), loop).result())
    lifeline = Lifeline(("127.0.0.1", cable.port), "a", TIMEOUTS, dict, heard.put)
    assert heard.get(timeout=SOON_S) == Orders()  # the ends have met
    yield Ends(loop, lifelines, lifeline, cable, heard, lost)
    lifeline.close()
    asyncio.run_coroutine_threadsafe(_others_end(), loop).result(SOON_S)
    loop.call_soon_threadsafe(loop.stop)


async def _others_end() -> None:
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)


def test_an_idle_lifeline_lives_on_and_hears_orders(ends: Ends) -> None:
    time.sleep(1.2 * TIMEOUTS.lease_s)
    ends.loop.call_soon_threadsafe(ends.lifelines.order, Orders(leave=3))
    assert ends.heard.get(timeout=SOON_S) == Orders(leave=3)
    assert ends.lost.empty()


def test_behind_a_partition_the_worker_is_taken_for_dead_and_then_counts_itself_out(ends: Ends) -> None:
    ends.cable.cut.set()
    assert ends.lost.get(timeout=SOON_S) == ("a", "not heard of for 0.4 s")
    assert ends.heard.empty()  # first the others go on without it
    assert ends.heard.get(timeout=SOON_S) is None
    assert ends.lifeline.ended


def test_a_worker_that_closes_its_end_is_lost_at_once(ends: Ends) -> None:
    began = time.monotonic()
    ends.lifeline.close()
    assert ends.lost.get(timeout=SOON_S)[0] == "a"
    assert time.monotonic() - began < TIMEOUTS.silence_s
