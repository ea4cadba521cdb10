"""What listens in a run on one machine, beside what docs/security.md says; strangers and pauses, which end nothing."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import time

import psutil
import pytest

from tests.checks import check_stopped
from tests.command import ROOT, Commands, Running, descendants

FOR_EVER = "run.steps=1000000"
PAUSE_S = 7.0  # longer than recovery.silence_s
NOISE = (b"", b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n", b"deadbeef\n", os.urandom(4096), b"A" * 300_000)


def listeners(running: Running) -> dict[tuple[str, int], str]:
    """Return address and port of everything that listens in a command -> the title of its process."""
    found: dict[tuple[str, int], str] = {}
    for pid, title in [(running.process.pid, "main.py"), *descendants(running.process.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            for connection in psutil.Process(pid).net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found[connection.laddr.ip, connection.laddr.port] = title
    return found


def documented() -> list[str]:
    """Return the processes of the page's first table."""
    page = (ROOT / "docs" / "security.md").read_text().partition("## On a cluster")[0]
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("|")]
    return rows[2:]


def is_loopback(address: str) -> bool:
    found = ipaddress.ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def make_noise(ports: list[int]) -> None:
    for port in ports:
        for noise in NOISE:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as stranger:
                stranger.sendall(noise)


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_local_run_listens_on_the_loopback_alone_and_neither_strangers_nor_a_pause_end_anything(
    command: Commands,
) -> None:
    running = command().start(FOR_EVER, "scaling.num_workers=2", "recovery.silence_s=3")
    running.wait_for_step(20, timeout_s=150)
    found = listeners(running)
    beyond = {place: title for place, title in found.items() if not is_loopback(place[0])}
    assert beyond == {}
    unknown = [title for title in found.values() if not any(process in title for process in documented())]
    assert unknown == []

    pids = running.worker_pids("SlotWorker")
    own = {port: title for (_, port), title in found.items() if "Coordinator" in title or "SlotWorker" in title}
    assert len([title for title in own.values() if title.startswith("ray::Coordinator")]) == 2
    (coordinator,) = [pid for pid, title in descendants(running.process.pid) if title.startswith("ray::Coordinator")]
    heartbeats = min(own, key=lambda port: not speaks_first(port))
    make_noise([heartbeats])
    os.kill(coordinator, signal.SIGSTOP)
    time.sleep(PAUSE_S)
    os.kill(coordinator, signal.SIGCONT)
    time.sleep(PAUSE_S)  # in which a coordinator that judges before it reads would have ended them
    running.wait_for_step(running.history.last_step + 20)
    assert running.worker_pids("SlotWorker") == pids
    assert [event["event"] for event in running.events if event["event"] in ("failure", "attempt_ended")] == []
    check_stopped(running)


def speaks_first(port: int) -> bool:
    """Return whether it is the server of heartbeats, which sends its challenge."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as stranger:
        return len(stranger.recv(100).strip()) == 32
    return False
