"""Copies in a machine's memory, held by a process of their own: workers die, and the copies stay."""

import gc
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest
import torch

from steadfast.checkpoint import memory_server
from steadfast.checkpoint.node_memory import Buffer, Label, ProcessMemory, SharedMemory, SnapshotId, open_memory
from steadfast.run.owner import Owner
from tests.dist.like_cuda import DEVICE, OUT_OF_MEMORY, LikeCuda, behave_like_cuda

OLD, NEW = SnapshotId(10, 1, 1), SnapshotId(20, 1, 1)
NUM_BYTES = 100_000
LINGER_S = 30.0
CPU = torch.device("cpu")
OPENED: list[SharedMemory] = []
# How many bytes a process gets for an answer.
STRANGER = """
import socket, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(chr(0) + sys.argv[1])
try:
    connection.send(b'{"verb": "list"}')
    print(len(connection.recv(1000)))
except OSError:
    print(0)
"""


@pytest.fixture
def name() -> Iterator[str]:
    name = f"steadfast-test-{uuid.uuid4().hex}"
    yield name
    while OPENED:
        OPENED.pop().close()
    for process in servers(name):
        process.kill()


def servers(name: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if name in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def wait_until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def kill_server(name: str) -> None:
    (server,) = servers(name)
    server.kill()
    wait_until(lambda: not servers(name))


def memory_of(name: str, watched_pid: int = 0, linger_s: float = LINGER_S, device: torch.device = CPU) -> SharedMemory:
    OPENED.append(SharedMemory(name, watched_pid, linger_s, device))
    return OPENED[-1]


def label(snapshot: SnapshotId) -> Label:
    return Label(snapshot, "", ((0, 0, NUM_BYTES),))


def fill(memory: SharedMemory, snapshot: SnapshotId) -> Buffer:
    buffer = memory.take(NUM_BYTES)
    buffer.bytes.fill_(snapshot.step)
    memory.commit(buffer, label(snapshot))
    return buffer


def fill_and_begin_another(name: str, ready: Any) -> None:
    """Fill a buffer and half of another one, and wait to be killed."""
    memory = memory_of(name)
    fill(memory, OLD)
    memory.take(NUM_BYTES).bytes[: NUM_BYTES // 2].fill_(1)
    ready.set()
    time.sleep(600)


def test_what_a_killed_worker_has_finished_is_there_and_what_it_has_begun_is_free_again(name: str) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    worker = context.Process(target=fill_and_begin_another, args=(name, ready), daemon=True)
    worker.start()
    assert ready.wait(60)
    os.kill(worker.pid or 0, signal.SIGKILL)
    worker.join()
    memory = memory_of(name)
    assert list(memory.stored().values()) == [label(OLD)]
    (number,) = memory.stored()
    assert bool((memory.open(number)[:NUM_BYTES] == OLD.step).all())
    held = memory.held_bytes()
    memory.take(NUM_BYTES)  # where the killed one was writing
    assert memory.held_bytes() == held == 2 * NUM_BYTES


def test_two_buffers_are_enough_for_ever(name: str) -> None:
    memory = memory_of(name)
    memory.reserve(NUM_BYTES, 2).join()
    assert memory.held_bytes() == 2 * NUM_BYTES
    last = SnapshotId(0, 1, 1)
    for step in range(1, 20):
        snapshot = SnapshotId(step, 1, 1)
        memory.keep([last, snapshot])
        fill(memory, snapshot)
        last = snapshot
        assert {label.snapshot.step for label in memory.stored().values()} == {step, max(1, step - 1)}
    assert memory.held_bytes() == 2 * NUM_BYTES
    # A world of another size cuts the state into other parts: memory for the former ones is given up.
    memory.keep([])
    memory.take(10 * NUM_BYTES)
    assert memory.held_bytes() == 10 * NUM_BYTES


def test_memory_takes_no_buffers_twice_when_an_attempt_ends_before_they_are_mapped(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, mapping, released = memory_of(name), threading.Event(), threading.Event()
    map_buffer = SharedMemory._map

    def map_late(self: SharedMemory, *arguments: Any) -> torch.Tensor:
        mapping.set()
        assert released.wait(30)
        return map_buffer(self, *arguments)

    monkeypatch.setattr(SharedMemory, "_map", map_late)
    memory.reserve(NUM_BYTES, 2)
    assert mapping.wait(30)
    memory.give_back()  # the next attempt begins
    memory.reserve(NUM_BYTES, 2)
    threading.Timer(0.5, released.set).start()
    memory.take(NUM_BYTES)
    assert memory.held_bytes() == 2 * NUM_BYTES


def test_it_ends_when_nobody_has_come_for_so_long(name: str) -> None:
    memory = memory_of(name, linger_s=1.0)
    fill(memory, OLD)
    time.sleep(2.5)
    assert len(memory.stored()) == 1  # as long as a worker is there, it stays
    memory.close()
    wait_until(lambda: not servers(name))


def test_it_ends_with_torchrun(name: str) -> None:
    command = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    fill(memory_of(name, watched_pid=command.pid), OLD)
    assert servers(name)
    command.kill()  # and not waited for: a process that has ended is still in the table
    wait_until(lambda: not servers(name))
    command.wait()


def test_it_ends_when_the_command_ended_before_it_began(name: str) -> None:
    command = subprocess.Popen([sys.executable, "-c", ""])
    command.wait()
    with suppress(OSError):  # it may have gone by then
        memory_of(name, watched_pid=command.pid).take(NUM_BYTES)
    wait_until(lambda: not servers(name))


@pytest.mark.parametrize("told_by_command", [False, True])
def test_it_ends_when_the_run_is_over_and_the_last_worker_has_gone(name: str, told_by_command: bool) -> None:
    first, second = memory_of(name), memory_of(name)
    fill(first, OLD)
    assert len(second.stored()) == 1
    if told_by_command:
        memory_server.end_server(name)
        first.close()
    else:
        first.end()
    time.sleep(1.5)
    assert len(second.stored()) == 1
    (second.close if told_by_command else second.end)()
    wait_until(lambda: not servers(name))
    memory_server.end_server(name)
    assert not servers(name)


@pytest.mark.parametrize(
    ("torchrun", "pid", "expected"), [(False, 0, 0), (True, 0, os.getppid()), (True, 1, os.getppid()), (False, 1, None)]
)
def test_copies_end_with_torchrun_and_outlive_a_command_of_ray(
    monkeypatch: pytest.MonkeyPatch, torchrun: bool, pid: int, expected: int | None
) -> None:
    """`pid`: 1 where this process is the command itself, as that of `fit` is."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    owner = Owner(1, "token", socket.gethostname(), os.getpid() if pid else os.getppid(), 1.0)
    memory = open_memory(owner, "key", "uri", LINGER_S, CPU)
    if expected is None:
        assert isinstance(memory, ProcessMemory)
    else:
        assert isinstance(memory, SharedMemory)
        assert memory._arguments == (str(expected), str(LINGER_S))


def test_it_outlives_whoever_has_started_it_and_there_is_one_only(name: str) -> None:
    memories = [memory_of(name) for _ in range(5)]
    for memory in memories:
        fill(memory, OLD)
    (server,) = servers(name)
    assert server.ppid() != os.getpid()
    assert os.getsid(server.pid) != os.getsid(0)
    assert len(memories[0].stored()) == 5
    assert server.memory_info().rss < 30e6


def test_one_that_was_killed_is_replaced_and_its_buffers_are_not_taken_for_the_new_ones(name: str) -> None:
    memory = memory_of(name)
    memory.reserve(NUM_BYTES, 1).join()
    fill(memory, OLD)
    kill_server(name)
    assert memory.stored() == {}
    assert fill(memory, NEW).number == 1
    assert [label.snapshot for label in memory.stored().values()] == [NEW]
    memory.verify(1)


def test_what_a_killed_one_gave_out_is_not_taken_for_what_its_successor_did(name: str) -> None:
    first, second = memory_of(name), memory_of(name)
    buffer = first.take(NUM_BYTES)
    kill_server(name)
    assert second.take(NUM_BYTES).number == buffer.number
    with pytest.raises(OSError, match="has ended"):
        first.commit(buffer, label(OLD))
    assert second.stored() == {}


def test_one_that_is_stopped_makes_training_wait_for_seconds_only_and_comes_back(name: str) -> None:
    memory = memory_of(name)
    fill(memory, OLD)
    (server,) = servers(name)
    server.suspend()
    try:
        began_s = time.monotonic()
        with pytest.raises(OSError, match="timed out"):
            memory.take(NUM_BYTES)
        assert time.monotonic() - began_s < 5
        assert memory.stored() == {}
    finally:
        server.resume()
    fill(memory, NEW)
    assert len(memory.stored()) == 2


def test_memory_that_the_machine_does_not_have_is_one_error(name: str) -> None:
    memory = memory_of(name)
    with pytest.raises(OSError, match=r"1125899906842624 bytes of shared memory: "):
        memory.take(2**50)
    fill(memory, OLD)
    assert len(memory.stored()) == 1


# Of the system, since another user may not see that of this one.
SYSTEM_PYTHON = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")


@pytest.mark.skipif(os.getuid() != 0 or SYSTEM_PYTHON is None, reason="needs to become another user, with a Python")
def test_another_user_of_the_machine_is_not_answered(name: str) -> None:
    fill(memory_of(name), OLD)
    stranger = subprocess.run(
        [str(SYSTEM_PYTHON), "-c", STRANGER, name], user=65534, capture_output=True, text=True, cwd="/"
    )
    assert stranger.stdout.strip() == "0", stranger


# Takes the name of a server, and says so.
SQUATTER = """
import socket, sys, time
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(chr(0) + sys.argv[1])
listener.listen()
print("listens", flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(os.getuid() != 0 or SYSTEM_PYTHON is None, reason="needs to become another user, with a Python")
def test_another_user_who_took_the_name_is_given_no_copy(name: str) -> None:
    command = [str(SYSTEM_PYTHON), "-c", SQUATTER, name]
    with subprocess.Popen(command, user=65534, stdout=subprocess.PIPE, text=True, cwd="/") as stranger:
        try:
            assert stranger.stdout
            assert stranger.stdout.readline() == "listens\n"
            memory = memory_of(name)
            with pytest.raises(OSError, match="user 65534 listens on its socket, not this run's user 0"):
                memory.take(NUM_BYTES)
            assert memory.stored() == {}
        finally:
            stranger.kill()


@pytest.mark.parametrize("num_bytes", [NUM_BYTES - 1, NUM_BYTES])
def test_memory_that_is_too_short_or_may_become_so_is_an_error(name: str, num_bytes: int) -> None:
    listener = memory_server.listen(name)
    assert listener

    def serve() -> None:
        connection, _ = listener.accept()
        connection.recv(memory_server.PACKET_BYTES)
        descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, num_bytes)
        answer = json.dumps({"buffer": 1, "bytes": NUM_BYTES, "there": [1]}).encode()
        socket.send_fds(connection, [answer], [descriptor])
        os.close(descriptor)
        connection.close()

    threading.Thread(target=serve, daemon=True).start()
    with listener, pytest.raises(OSError, match=f"gives {num_bytes} bytes, where {NUM_BYTES} of fixed length"):
        memory_of(name).take(NUM_BYTES)


def test_a_servers_memory_cannot_be_cut_off() -> None:
    descriptor = memory_server._allocate(NUM_BYTES)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 1)
    os.close(descriptor)


def test_a_copy_that_has_changed_since_it_was_made_is_found_out(name: str) -> None:
    memory = memory_of(name)
    buffer = fill(memory, OLD)
    fill(memory, NEW)
    one, other = memory.stored()
    memory.verify(one)
    memory.verify(other)
    buffer.bytes[NUM_BYTES // 2] ^= 1
    with pytest.raises(OSError, match="not those that were copied"):
        memory.verify(one)
    memory.verify(other)
    memory.keep([NEW])
    with pytest.raises(OSError, match="the copy is gone"):
        memory.verify(one)


def test_garbage_ends_one_connection_and_nothing_else(name: str) -> None:
    memory = memory_of(name)
    fill(memory, OLD)
    takes = (b'{"verb": "take", "bytes": %s}' % each for each in (b"1e999", b'"x"', b"null"))
    opens = (b'{"verb": "commit"}', b'{"verb": "open", "buffer": 99}')
    for packet in (b"\0" * 70_000, b"[" * 60_000, b"{}", b"5", b"\xff", *opens, *takes):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(f"\0{name}")
            connection.send(packet)
            assert connection.recv(1000) == b""
    assert len(memory.stored()) == 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[LikeCuda]:
    twin = behave_like_cuda(monkeypatch)
    yield twin
    while OPENED:
        OPENED.pop().close()
    assert twin.mistakes == []
    assert twin.registered == {}


def copies_of(memory: SharedMemory, cuda: LikeCuda, num_bytes: int, first_step: int) -> None:
    """Copy two states of `num_bytes`, and check what others read of them."""
    for step in (first_step, first_step + 1):
        snapshot = SnapshotId(step, 1, 1)
        memory.keep([SnapshotId(step - 1, 1, 1), snapshot])
        state = torch.randint(255, (num_bytes,), dtype=torch.uint8)
        buffer = memory.take(num_bytes)
        cuda.copy(state, buffer.bytes[:num_bytes])
        cuda.synchronize()
        cuda.launch()
        memory.commit(buffer, Label(snapshot, "", ((0, 0, num_bytes),)))
        other = memory_of(memory._name)
        (number,) = [number for number, label in other.stored().items() if label.snapshot == snapshot]
        assert torch.equal(other.open(number)[:num_bytes], state)
        other.close()
    gc.collect()


@pytest.mark.parametrize("num_parts", [(4, 3, 4), (3, 4, 3)])
def test_pinned_memory_is_unregistered_before_unmapping(name: str, cuda: LikeCuda, num_parts: tuple[int, ...]) -> None:
    """Worlds of other sizes cut the state into other parts, whose memory comes to lie at the same addresses."""
    memory = memory_of(name, device=DEVICE)
    for generation, parts in enumerate(num_parts):
        copies_of(memory, cuda, 24 * 2**20 // parts, 10 * generation + 1)
        memory.keep([])
        assert len(cuda.registered) == 2
    memory.close()
    copies_of(memory, cuda, 2**20, 100)


def test_memory_that_was_reserved_is_pinned_by_the_thread_that_reserves_it(name: str, cuda: LikeCuda) -> None:
    other, memory = memory_of(name), memory_of(name, device=DEVICE)
    for _ in range(2):
        other.take(NUM_BYTES)
    memory.reserve(NUM_BYTES, 2).join()
    other.give_back()  # buffers of another worker, which are free too by then
    assert cuda.threads == ["reserve"] * 2
    copies_of(memory, cuda, NUM_BYTES, 1)
    assert len(cuda.threads) == 2


def test_a_copy_under_way_ends_before_its_memory_is_unregistered(name: str, cuda: LikeCuda) -> None:
    memory = memory_of(name, device=DEVICE)
    cuda.copy(torch.ones(NUM_BYTES, dtype=torch.uint8), memory.take(NUM_BYTES).bytes)
    memory.close()


def test_copies_go_on_unpinned_where_cuda_refuses_memory(name: str, cuda: LikeCuda) -> None:
    memory = memory_of(name, device=DEVICE)
    cuda.refuses = OUT_OF_MEMORY
    copies_of(memory, cuda, NUM_BYTES, 1)
    assert cuda.registered == {}
