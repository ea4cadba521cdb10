"""What listens in a run on one machine, beside what docs/security.md says; strangers and pauses, which end nothing."""

import contextlib
import ipaddress
import os
import signal
import socket
import time
from itertools import cycle, islice

import psutil
import pytest

from tests.support.bed import Bed
from tests.support.checks import check_stopped
from tests.support.command import FOR_EVER, ROOT, Commands, descendants

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

STRANGERS = 1000
PAUSE_S = 7.0  # longer than recovery.silence_s
NOISE = (b"", b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n", b"deadbeef\n", os.urandom(4096), b"A" * 300_000)


def listeners(root: int) -> dict[tuple[str, int], str]:
    """Return address and port of everything that listens in a process, or below -> the title of its process."""
    found: dict[tuple[str, int], str] = {}
    for pid, title in [(root, "main.py"), *descendants(root)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            for connection in psutil.Process(pid).net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found[connection.laddr.ip, connection.laddr.port] = title
    return found


def documented() -> list[str]:
    """Return the processes of the page's first table, which names Ray's as well."""
    page = (ROOT / "docs" / "security.md").read_text().partition("## On a cluster")[0]
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("|")]
    return [process for row in rows[2:] for process in row.split(", ")]


def unknown(found: dict[tuple[str, int], str]) -> list[str]:
    """Return the titles that no row of the page explains. One port of an actor is Ray's; more need a row of its own."""
    rows = documented()
    unexplained = []
    for title in set(found.values()):
        own_rows = [process for process in rows if process in title and process != "ray::"]
        ports = {port for (_, port), each in found.items() if each == title}
        is_rays_alone = "ray::" in rows and title.startswith("ray::") and len(ports) == 1
        if not (own_rows or is_rays_alone):
            unexplained.append(title)
    return unexplained


def is_loopback(address: str) -> bool:
    found = ipaddress.ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def make_noise(place: tuple[str, int], number: int) -> None:
    for noise in islice(cycle(NOISE), number):
        with contextlib.suppress(OSError), socket.create_connection(place, timeout=1) as stranger:
            stranger.sendall(noise)


def test_a_local_run_listens_on_the_loopback_alone_and_neither_strangers_nor_a_pause_end_anything(
    command: Commands,
) -> None:
    running = command().start(FOR_EVER, "scaling.num_workers=2", "recovery.silence_s=3")
    running.wait_for_step(20, timeout_s=150)
    found = listeners(running.process.pid)
    beyond = {place: title for place, title in found.items() if not is_loopback(place[0])}
    assert beyond == {}
    assert unknown(found) == []

    pids = running.worker_pids()
    assert len([title for title in found.values() if title.startswith("ray::Coordinator")]) == 2
    (coordinator,) = [pid for pid, title in descendants(running.process.pid) if title.startswith("ray::Coordinator")]
    make_noise(heartbeats_of(found), len(NOISE))
    os.kill(coordinator, signal.SIGSTOP)
    time.sleep(PAUSE_S)
    os.kill(coordinator, signal.SIGCONT)
    time.sleep(PAUSE_S)  # in which a coordinator that judges before it reads would have ended them
    running.wait_for_step(running.history.last_step + 20)
    assert running.worker_pids() == pids
    assert [event["event"] for event in running.events if event["event"] in ("failure", "attempt_ended")] == []
    check_stopped(running)


@pytest.mark.slow
def test_on_a_cluster_a_thousand_strangers_neither_stop_the_steps_nor_keep_a_newcomer_out(command: Commands) -> None:
    with Bed(num_nodes=2) as bed, contextlib.ExitStack() as held:
        words = (FOR_EVER, f"cluster.address={bed.address}", "scaling.num_workers=[1,2]")
        running = command().start(*words)
        running.wait_for_event("attempt_started", world_size=2)
        found = listeners(os.getpid())
        assert unknown({place: title for place, title in found.items() if place[1] not in own_ports()}) == []
        heartbeats = heartbeats_of(found)
        assert heartbeats[0] == bed.address.partition(":")[0], "the head's address alone, and not every interface"

        for _ in range(STRANGERS):
            held.enter_context(socket.create_connection(heartbeats, timeout=5))
        make_noise(heartbeats, STRANGERS)
        running.wait_for_step(running.history.last_step + 20)
        os.kill(next(pid for pid, title in descendants(os.getpid()) if "SlotWorker" in title), signal.SIGKILL)
        running.wait_for_event("attempt_started", attempt=2, world_size=1)
        running.wait_for_event("attempt_started", attempt=3, world_size=2)
        running.wait_for_step(running.history.last_step + 20)
        check_stopped(running, 1)


def own_ports() -> set[int]:
    """Return the ports on which this process itself listens."""
    return {each.laddr.port for each in psutil.Process().net_connections("inet") if each.status == psutil.CONN_LISTEN}


def heartbeats_of(found: dict[tuple[str, int], str]) -> tuple[str, int]:
    """Return where the coordinator listens for heartbeats."""
    places = [place for place, title in found.items() if title.startswith("ray::Coordinator")]
    return next(place for place in places if speaks_first(place))


def speaks_first(place: tuple[str, int]) -> bool:
    """Return whether it is the server of heartbeats, which sends its challenge."""
    with contextlib.suppress(OSError), socket.create_connection(place, timeout=1) as stranger:
        return len(stranger.recv(100).strip()) == 32
    return False
