"""Hold the newest state of a run in a machine's memory, outside of the processes that train.

One process a machine, started by the first worker that needs it (`app/checkpoint/node_memory.py`). It owns buffers of
anonymous shared memory (memfd_create(2)), which workers map, fill and read; it never reads one itself. So whatever
kills the workers leaves the state behind, and when this process ends, nothing of it is left: no file has a name. It is
run by its path and imports nothing but the standard library, which keeps it small, and it never touches a GPU.
"""

# A message is one packet of JSON, at most; a request's answer may carry a file descriptor.
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import queue
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PACKET_BYTES = 2**17
_TICK_S = 0.5
_END_S = 2.0  # for the answer to `end`
_CONNECTIONS = 4096
_MOST_TOO_LARGE = 1.25
_MOST_OF_FREE = 0.8
_CGROUPS = (  # of version 2, then of version 1: where a container sees its own; files of its limit and its use
    ("/sys/fs/cgroup", "memory.max", "memory.current"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_HASHED_AT_ONCE_BYTES = 2**20
_IDS = struct.Struct("3i")  # of SO_PEERCRED: process, user, group

Message = dict[str, Any]


@dataclass(eq=False)
class _Buffer:
    descriptor: int
    num_bytes: int
    writer: int | None = None  # descriptor of the connection that fills it, None once it is committed or free
    # What its writer says that it holds, to which the hashing thread adds "sha256". None while it is filled, or free.
    label: Message | None = None

    @property
    def free(self) -> bool:
        return self.writer is None and self.label is None


class MemoryServer:
    """Serve the buffers of one run on one machine.

    Args:
        listener: what workers connect to.
        watched_pid: torchrun's process: when it ends, so does this one. 0 for none.
        linger_s: how long to wait for another worker, perhaps of the next command, when the last one has gone.
    """

    def __init__(self, listener: socket.socket, watched_pid: int, linger_s: float) -> None:
        self._listener = listener
        self._watched = (watched_pid, _started(watched_pid))
        self._linger_s = linger_s
        self._alone_since_s: float | None = time.monotonic()
        self._over = False  # the run has ended
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, socket.socket] = {}
        self._buffers: dict[int, _Buffer] = {}
        self._num_made = 0
        self._to_hash: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()

    def serve(self) -> None:
        """Answer until the run has ended, torchrun has gone, or no worker has come for too long."""
        threading.Thread(target=self._hash_for_ever, daemon=True, name="hash").start()
        self._selector.register(self._listener, selectors.EVENT_READ)
        while not self._is_done():
            for key, _ in self._selector.select(_TICK_S):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._serve(self._connections[key.fd])

    def _is_done(self) -> bool:
        pid, started = self._watched
        # The command may have ended before this process began.
        if pid and (not started or _started(pid) != started):
            return True
        if self._alone_since_s is None:
            return False
        return self._over or time.monotonic() - self._alone_since_s > self._linger_s

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        # The name of the socket is no secret on this machine.
        if user_of(connection) != os.getuid() or len(self._connections) >= _CONNECTIONS:
            connection.close()
            return
        self._connections[connection.fileno()] = connection
        self._selector.register(connection, selectors.EVENT_READ)
        self._alone_since_s = None

    def _serve(self, connection: socket.socket) -> None:
        try:
            packet = connection.recv(PACKET_BYTES)
            if packet:
                answer, descriptor = self._answer(json.loads(packet), connection.fileno())
                sent = [descriptor] if descriptor is not None else []
                socket.send_fds(connection, [json.dumps(answer).encode()], sent)
                return
        except (OSError, ValueError, KeyError, TypeError):
            pass  # it is gone, or no worker of ours
        self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._connections[connection.fileno()]
        self._give_back(connection.fileno())  # half of a state is worth nothing
        connection.close()
        if not self._connections:
            self._alone_since_s = time.monotonic()

    def _answer(self, request: Message, writer: int) -> tuple[Message, int | None]:
        match request["verb"]:
            case "take":
                return self._take(int(request["bytes"]), request.get("mapped", ()), writer)
            case "commit":
                buffer = self._buffers[request["buffer"]]
                # One that a former server gave out may have the number of another worker's by now.
                if buffer.writer != writer:
                    raise KeyError(request["buffer"])
                buffer.label = dict(request["label"])
                buffer.writer = None
                self._to_hash.put(buffer)
            case "give back":
                self._give_back(writer)
            case "open":
                return {}, self._buffers[request["buffer"]].descriptor
            case "keep":
                self._release_others(request["snapshots"])
            case "end":
                self._over = True
        return {"buffers": self._listed()}, None

    def _take(self, num_bytes: int, mapped: Sequence[int], writer: int) -> tuple[Message, int | None]:
        try:
            if not self._free_buffers(num_bytes):
                # Those that are free are of another size than the state is cut into now.
                for number in self._free_buffers(0):
                    os.close(self._buffers.pop(number).descriptor)
                self._make(num_bytes)
        except OSError as error:
            return {"error": f"{num_bytes} bytes of shared memory: {error.strerror}"}, None
        free = self._free_buffers(num_bytes)
        # To map a buffer, and to pin it, takes a worker longer than to fill it.
        number = next((each for each in free if each in mapped), free[0])
        buffer = self._buffers[number]
        buffer.writer = writer
        return {"buffer": number, "bytes": buffer.num_bytes, "there": sorted(self._buffers)}, buffer.descriptor

    def _free_buffers(self, num_bytes: int) -> list[int]:
        fitting = []
        for number, buffer in self._buffers.items():
            # One that is far too large would hold memory that nobody uses.
            if buffer.free and (not num_bytes or num_bytes <= buffer.num_bytes <= _MOST_TOO_LARGE * num_bytes):
                fitting.append(number)
        return fitting

    def _make(self, num_bytes: int) -> None:
        self._num_made += 1
        self._buffers[self._num_made] = _Buffer(_allocate(num_bytes), num_bytes)

    def _give_back(self, writer: int) -> None:
        for buffer in self._buffers.values():
            if buffer.writer == writer:
                buffer.writer = None

    def _release_others(self, kept: list[list[int]]) -> None:
        for buffer in self._buffers.values():
            if buffer.label is not None and buffer.label["snapshot"] not in kept:
                buffer.label = None

    def _hash_for_ever(self) -> None:
        """Add to each label the digest of what its buffer holds, which tells a restore whether bytes have changed."""
        # In this process, since a hash would keep a worker from its next step; and behind all training.
        os.nice(10)
        while True:
            buffer = self._to_hash.get()
            label = buffer.label
            with contextlib.suppress(OSError, ValueError, TypeError):  # the buffer is gone, or its label is not ours
                if label is not None:
                    # If the buffer is filled again meanwhile, this label is no longer in use.
                    label["sha256"] = sha256_of(buffer.descriptor, num_labelled(label["files"]))

    def _listed(self) -> dict[int, Message]:
        return {number: {"bytes": each.num_bytes, "label": each.label} for number, each in self._buffers.items()}


def free_bytes() -> int:
    """Return how much memory is free: of this machine, or of the container that this process is in."""
    limits = []
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            limits.append(1024 * int(line.split()[1]))
    for folder, limit, used in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            used_bytes = int(_read(f"{folder}/{used}")) - _file_cache_bytes(_read(f"{folder}/memory.stat"))
            limits.append(max(0, int(_read(f"{folder}/{limit}")) - used_bytes))
    return min(limits)


def _file_cache_bytes(statistics: str) -> int:
    """Return what a container's `memory.stat` counts as used, and what goes as soon as somebody needs it."""
    num_bytes = 0
    for line in statistics.splitlines():
        name, _, number = line.partition(" ")
        if name in ("active_file", "inactive_file"):
            num_bytes += int(number)
    return num_bytes


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _allocate(num_bytes: int) -> int:
    # Linux grants any amount, and ends processes when there is no more.
    if num_bytes > _MOST_OF_FREE * free_bytes():
        raise OSError(errno.ENOMEM, "not enough memory is free")
    descriptor = os.memfd_create("steadfast", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Here and now: a page that is missing when a worker writes to it would kill the worker.
        os.posix_fallocate(descriptor, 0, max(1, num_bytes))
        # A page that is cut off under a worker's mapping would kill the worker.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def num_labelled(files: Sequence[Sequence[int]]) -> int:
    """Return how many bytes of a buffer its files take."""
    return max((start + length for _, start, length in files), default=0)


def sha256_of(descriptor: int, num_bytes: int) -> str:
    """Return the digest of the first bytes of a file."""
    # Read, not mapped: mapped pages would count as this process's own memory.
    digest = hashlib.sha256()
    for start in range(0, num_bytes, _HASHED_AT_ONCE_BYTES):
        digest.update(os.pread(descriptor, min(_HASHED_AT_ONCE_BYTES, num_bytes - start), start))
    return digest.hexdigest()


def user_of(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a socket, as the kernel knows it."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _IDS.size)
    return int(_IDS.unpack(packed)[1])


def _started(pid: int) -> str:
    """Return when a process started, which tells it from a later one of its number; "" if there is none."""
    try:
        state, *fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]


def server_name(uri: str, key: str) -> str:
    """Return the name of a machine's server for the run at `uri`, whose secret is `key`."""
    return f"steadfast-{hashlib.sha256(f'{uri} {key}'.encode()).hexdigest()[:32]}"


def end_server(name: str) -> None:
    """Let the server of this name end when its last worker has gone; do nothing if there is no such server."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_END_S)
        connection.connect(f"\0{name}")
        connection.send(json.dumps({"verb": "end"}).encode())
        connection.recv(PACKET_BYTES)


def listen(name: str) -> socket.socket | None:
    """Return the listening socket of this name; None if another server has it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(f"\0{name}")  # abstract: its name ends with it
    except OSError:
        listener.close()
        return None
    listener.listen(128)
    return listener


def main(name: str, watched_pid: str, linger_s: str) -> None:
    """Serve in a process of its own, which no other one waits for; return in the first one at once."""
    listener = listen(name)
    if listener is None:
        return
    # Twice, and in a session of its own: neither the end of the worker that has started it, nor what ends the worker's
    # children or its process group, ends this one.
    if child := os.fork():
        os.waitpid(child, 0)  # when the command returns, this run's server is the only process that bears its name
        return
    os.setsid()
    if os.fork():
        return
    os.chdir("/")
    # Whoever stops a service sends these to all of its processes, while the command may yet need what is held here.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    MemoryServer(listener, int(watched_pid), float(linger_s)).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
