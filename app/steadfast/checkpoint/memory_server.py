"""Process that holds snapshots of a run in a machine's memory.

Each machine has one such process, which the first worker that needs it starts (`checkpoint/node_memory.py`). The
process owns buffers of anonymous shared memory (memfd_create(2)), which workers map, fill and read. So the snapshots
survive the death of all workers, and disappear with this process, because no file system has a name for them. The
process runs this file by its path, imports only the standard library to stay small, and uses no GPU.
"""

# A message is one packet of JSON; an answer may carry a file descriptor.
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

# The longest packet is the list of all buffers.
PACKET_BYTES = 2**17
_TICK_S = 0.5
_END_S = 2.0  # time to wait for the answer to `end`
_CONNECTIONS = 4096
_MOST_TOO_LARGE = 1.25
_MOST_OF_FREE = 0.8
_CGROUPS = (  # cgroup version 2, then 1: folder that a container sees, file of its limit, file of its use
    ("/sys/fs/cgroup", "memory.max", "memory.current"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_HASHED_AT_ONCE_BYTES = 2**20
_IDS = struct.Struct("3i")  # layout of SO_PEERCRED: process, user, group

Message = dict[str, Any]


@dataclass(eq=False)
class _Buffer:
    descriptor: int
    num_bytes: int
    writer: int | None = None  # descriptor of the connection that fills the buffer; None if committed or free
    # Description by the writer, to which the hashing thread adds "sha256"; None while the buffer is filled or free.
    label: Message | None = None

    @property
    def free(self) -> bool:
        return self.writer is None and self.label is None


class MemoryServer:
    """Serves the buffers of one run on one machine.

    Args:
        listener: socket to which workers connect.
        watched_pid: process of torchrun, whose end ends this process; 0 for none.
        linger_s: time to wait for another worker, perhaps of the next command, after the last one has disconnected.
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
        """Answer requests until the run or torchrun ends, or workers stay away."""
        threading.Thread(target=self._hash_for_ever, daemon=True, name="hash").start()
        self._selector.register(self._listener, selectors.EVENT_READ)
        while not self._is_done():
            for key, _ in self._selector.select(_TICK_S):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._serve(self._connections[key.fd])

    def _is_done(self) -> bool:
        # This process is detached (see `main`), so the system does not report torchrun's end to it.
        pid, started = self._watched
        # The watched process may have ended before this process began.
        if pid and (not started or _started(pid) != started):
            return True
        if self._alone_since_s is None:
            return False
        return self._over or time.monotonic() - self._alone_since_s > self._linger_s

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        # Any process on this machine can see the name of the socket, so only the user's own processes are accepted.
        if user_of(connection) != os.getuid() or len(self._connections) >= _CONNECTIONS:
            connection.close()
            return
        self._connections[connection.fileno()] = connection
        self._selector.register(connection, selectors.EVENT_READ)
        self._alone_since_s = None

    def _serve(self, connection: socket.socket) -> None:
        try:
            packet = connection.recv(PACKET_BYTES)
            # An empty packet means that the worker has closed its connection.
            if packet:
                answer, descriptors = self._answer(json.loads(packet), connection.fileno())
                socket.send_fds(connection, [json.dumps(answer).encode()], descriptors)
                return
        except Exception:
            pass  # the worker is gone, or the peer is not a worker of this program and has sent anything
        self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._connections[connection.fileno()]
        self._give_back(connection.fileno())  # a partial state is useless
        connection.close()
        if not self._connections:
            self._alone_since_s = time.monotonic()

    def _answer(self, request: Message, writer: int) -> tuple[Message, list[int]]:
        """Carry out a request; return the answer and the descriptors to send along."""
        match request["verb"]:
            case "take":
                return self._take(int(request["bytes"]), request.get("mapped", ()), writer)
            case "commit":
                buffer = self._buffers[request["buffer"]]
                # After a restart of the server, a buffer's number from the former server may belong to another worker.
                if buffer.writer != writer:
                    raise KeyError(request["buffer"])
                buffer.label = dict(request["label"])
                buffer.writer = None
                self._to_hash.put(buffer)
            case "give back":
                self._give_back(writer)
            case "open":
                return {}, [self._buffers[request["buffer"]].descriptor]
            case "keep":
                self._release_others(request["snapshots"])
            case "end":
                self._over = True
        return {"buffers": self._listed()}, []

    def _take(self, num_bytes: int, mapped: Sequence[int], writer: int) -> tuple[Message, list[int]]:
        try:
            if not self._free_buffers(num_bytes):
                # The free buffers have sizes for another sharding of the state.
                for number in self._free_buffers(0):
                    os.close(self._buffers.pop(number).descriptor)
                self._num_made += 1
                self._buffers[self._num_made] = _Buffer(_allocate(num_bytes), num_bytes)
        except OSError as error:
            return {"error": f"{num_bytes} bytes of shared memory: {error.strerror}"}, []
        free = self._free_buffers(num_bytes)
        number = free[0]
        # A mapped buffer is preferred, because a worker takes longer to map and pin a buffer than to fill it.
        for each in free:
            if each in mapped:
                number = each
                break
        buffer = self._buffers[number]
        buffer.writer = writer
        return {"buffer": number, "bytes": buffer.num_bytes, "there": sorted(self._buffers)}, [buffer.descriptor]

    def _free_buffers(self, num_bytes: int) -> list[int]:
        fitting = []
        for number, buffer in self._buffers.items():
            # A buffer that is far too large would waste memory.
            if buffer.free and (not num_bytes or num_bytes <= buffer.num_bytes <= _MOST_TOO_LARGE * num_bytes):
                fitting.append(number)
        return fitting

    def _give_back(self, writer: int) -> None:
        for buffer in self._buffers.values():
            if buffer.writer == writer:
                buffer.writer = None

    def _release_others(self, kept: list[list[int]]) -> None:
        for buffer in self._buffers.values():
            if buffer.label is not None and buffer.label["snapshot"] not in kept:
                buffer.label = None

    def _hash_for_ever(self) -> None:
        """Add digests of the buffers to their labels, to detect changes."""
        # Hashing in this process keeps workers free for their steps; a low priority keeps it behind training.
        os.nice(10)
        while True:
            buffer = self._to_hash.get()
            label = buffer.label
            with contextlib.suppress(OSError, ValueError, TypeError):  # the buffer is gone, or its label is malformed
                if label is not None:
                    # If the buffer is filled again meanwhile, this label is no longer in use.
                    label["sha256"] = sha256_of(buffer.descriptor, num_labelled(label["files"]))

    def _listed(self) -> dict[int, Message]:
        listed: dict[int, Message] = {}
        for number, buffer in self._buffers.items():
            listed[number] = {"bytes": buffer.num_bytes, "label": buffer.label}
        return listed


def free_bytes() -> int:
    """Return the free memory of this machine or of this process's container."""
    limits = []
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            limits.append(1024 * int(line.split()[1]))
    for folder, limit, used in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # the limit may be "max", which is not a number
            used_bytes = int(_read(f"{folder}/{used}")) - _file_cache_bytes(_read(f"{folder}/memory.stat"))
            limits.append(max(0, int(_read(f"{folder}/{limit}")) - used_bytes))
    return min(limits)


def _file_cache_bytes(statistics: str) -> int:
    """Return the bytes of a container's file cache from its `memory.stat`."""
    # The kernel counts the cache as used, but frees it on demand.
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
    # Linux grants any amount, and kills processes when memory is exhausted.
    if num_bytes > _MOST_OF_FREE * free_bytes():
        raise OSError(errno.ENOMEM, "not enough memory is free")
    descriptor = os.memfd_create("steadfast", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Allocated now, because a page that is missing when a worker writes to it would kill the worker.
        # The call refuses a length of 0.
        os.posix_fallocate(descriptor, 0, max(1, num_bytes))
        # Sealed, because a page that is cut off under a worker's mapping would kill the worker.
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
    # Read rather than mapped, because mapped pages would count as this process's own memory.
    digest = hashlib.sha256()
    for start in range(0, num_bytes, _HASHED_AT_ONCE_BYTES):
        digest.update(os.pread(descriptor, min(_HASHED_AT_ONCE_BYTES, num_bytes - start), start))
    return digest.hexdigest()


def user_of(connection: socket.socket) -> int:
    """Return the user id of a socket's peer, from the kernel."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _IDS.size)
    return int(_IDS.unpack(packed)[1])


def _started(pid: int) -> str:
    """Return the start time of a process, "" if there is none."""
    try:
        # The name of the command may itself contain spaces and brackets, so the fields begin after the last bracket.
        state, *fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except OSError:
        return ""
    # A process that has ended keeps its number until its parent asks for its exit status.
    if state in "ZX":
        return ""
    # The start time distinguishes the process from a later one with the same number.
    return fields[18]


def server_name(uri: str, key: str) -> str:
    """Return the server's name for the run at `uri` with secret `key`."""
    return f"steadfast-{hashlib.sha256(f'{uri} {key}'.encode()).hexdigest()[:32]}"


def end_server(name: str) -> None:
    """Ask a server, if any, to end after its last worker."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_END_S)
        connection.connect(f"\0{name}")
        connection.send(json.dumps({"verb": "end"}).encode())
        connection.recv(PACKET_BYTES)


def listen(name: str) -> socket.socket | None:
    """Return a listening socket of this name, None if taken."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(f"\0{name}")  # an abstract socket, whose name disappears with it
    except OSError:
        listener.close()
        return None
    listener.listen(128)
    return listener


def main(name: str, watched_pid: str, linger_s: str) -> None:
    """Serve in a detached process; return in the original process at once."""
    listener = listen(name)
    if listener is None:
        return
    # Two forks and a new session detach the server: neither the end of the worker that has started it, nor signals to
    # the worker's children or process group, end the server.
    if child := os.fork():
        os.waitpid(child, 0)  # afterwards the server is the only process of this command line
        return
    os.setsid()
    if os.fork():
        return
    # A file system cannot be unmounted while it has the working directory of a process.
    os.chdir("/")
    # Service managers send these signals to all processes of a service, while the command may still need the snapshots.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    MemoryServer(listener, int(watched_pid), float(linger_s)).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
