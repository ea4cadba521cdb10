"""Memory for snapshots: of a machine, outliving workers, or of a process."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from steadfast.checkpoint import memory_server
from steadfast.checkpoint.pinned import pin
from steadfast.run.owner import Owner

_CPU = torch.device("cpu")
_START_S = 20.0  # time limit for the start of a process
_ANSWER_S = 2.0  # time limit of requests that need no new memory
_POLL_S = 0.05
_SLOWEST_BYTES_PER_S = 2e8  # slowest expected rate of allocation by the system
_SLOWEST_HASH_BYTES_PER_S = 5e7  # slowest expected rate, on a busy processor without hash instructions


class SnapshotId(NamedTuple):
    """Identifies the copies of one snapshot. The newest sorts last."""

    step: int
    attempt: int
    num_ranks: int  # that together hold one state: 1 if each copy is complete


Files = tuple[tuple[int, int, int], ...]  # rank, first byte, length in bytes


class Label(NamedTuple):
    """Content of a buffer: files of some ranks, one after another."""

    snapshot: SnapshotId
    origin: str  # digest of model, data and skipped steps, on which the state depends
    files: Files


@dataclass(frozen=True)
class Buffer:
    """Memory to fill; `number` is None for temporary memory."""

    number: int | None
    bytes: Tensor  # uint8, at least of the requested length


class NodeMemory(Protocol):
    """Interface of the memory for copies.

    A copy exists from `commit` until `keep` leaves it out.
    """

    lasting: bool  # copies outlive this process

    def take(self, num_bytes: int) -> Buffer:
        """Return a buffer to fill. Raises OSError without memory."""
        ...

    def reserve(self, num_bytes: int, count: int) -> threading.Thread | None:
        """Allocate `count` buffers, if possible, and return the thread that does it.

        None means that no thread is needed. `take` waits for the thread.
        """
        ...

    def commit(self, buffer: Buffer, label: Label) -> None:
        """Store a filled buffer as a copy. Raises OSError without memory."""
        ...

    def give_back(self) -> None:
        """Release the buffers that this process has taken and not committed."""
        ...

    def keep(self, snapshots: Collection[SnapshotId]) -> None:
        """Release copies of all snapshots but these. Raises OSError without memory."""
        ...

    def stored(self) -> dict[int, Label]:
        """Return the stored copies by number, none if the memory is gone."""
        ...

    def open(self, number: int) -> Tensor:
        """Return a stored copy, not to be changed. Raises OSError without one."""
        ...

    def verify(self, number: int) -> None:
        """Check that a stored copy is unchanged. Raises OSError otherwise."""
        ...

    def held_bytes(self) -> int:
        """Return the bytes of all buffers, with and without copies."""
        ...

    def end(self) -> None:
        """Record that the run is over and needs no copies."""
        ...


class ProcessMemory:
    """Copies in this process's memory, which are lost when the process ends."""

    lasting = False

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._taken: set[int] = set()
        self._labels: dict[int, Label] = {}

    def take(self, num_bytes: int) -> Buffer:
        # A free tensor is used again, because the system provides the pages of new memory one by one.
        for number, tensor in enumerate(self._tensors):
            if number not in self._labels and number not in self._taken and len(tensor) >= num_bytes:
                self._taken.add(number)
                return Buffer(number, tensor)
        self._tensors.append(torch.empty(num_bytes, dtype=torch.uint8))
        self._taken.add(len(self._tensors) - 1)
        return Buffer(len(self._tensors) - 1, self._tensors[-1])

    def reserve(self, num_bytes: int, count: int) -> threading.Thread | None:
        return None  # only the first copy takes longer without a reservation

    def commit(self, buffer: Buffer, label: Label) -> None:
        if buffer.number is not None:
            self._taken.discard(buffer.number)
            self._labels[buffer.number] = label

    def give_back(self) -> None:
        self._taken.clear()

    def keep(self, snapshots: Collection[SnapshotId]) -> None:
        for number, label in list(self._labels.items()):
            if label.snapshot not in snapshots:
                del self._labels[number]

    def stored(self) -> dict[int, Label]:
        return dict(self._labels)

    def open(self, number: int) -> Tensor:
        return self._tensors[number]

    def verify(self, number: int) -> None:
        pass  # the copy is as safe as the state in the same process

    def held_bytes(self) -> int:
        return sum(map(len, self._tensors))

    def end(self) -> None:
        self._labels.clear()


class SharedMemory:
    """Copies in the memory of the machine, held by a separate process.

    The first copy starts that process.

    Args:
        name: name of the run's server on this machine.
        watched_pid: process of torchrun, whose end ends the copies; 0 if there is none.
        linger_s: how long the copies stay after the last worker has left.
        device: source of the copies. Memory is pinned for a GPU.
    """

    lasting = True

    def __init__(self, name: str, watched_pid: int, linger_s: float, device: torch.device = _CPU) -> None:
        self._name = name
        self._arguments = (str(watched_pid), str(linger_s))
        self._device = device
        self._connection: socket.socket | None = None
        self._mapped: dict[int, tuple[int, Tensor]] = {}  # number -> inode and mapped memory
        self._reserving: threading.Thread | None = None

    def take(self, num_bytes: int) -> Buffer:
        if self._reserving is not None:
            self._reserving.join()
        answer, descriptor = self._ask({"verb": "take", "bytes": num_bytes, "mapped": list(self._mapped)}, num_bytes)
        # Linux frees memory only when no process maps it, so buffers that the server has closed are unmapped.
        for gone in self._mapped.keys() - set(answer["there"]):
            del self._mapped[gone]
        number = int(answer["buffer"])
        return Buffer(number, self._map(number, descriptor, answer["bytes"]))

    def reserve(self, num_bytes: int, count: int) -> threading.Thread:
        # A separate connection, because the training thread uses the other one.
        asking = SharedMemory(self._name, 0, 0.0)
        asking._arguments = self._arguments
        former = self._reserving

        def make_room() -> None:
            # The thread of an ended attempt holds buffers that this one can use.
            if former is not None:
                former.join()
            with contextlib.suppress(OSError):
                for _ in range(count):
                    answer, descriptor = asking._ask({"verb": "take", "bytes": num_bytes}, num_bytes)
                    self._map(int(answer["buffer"]), descriptor, answer["bytes"])
            asking.close()  # the server then frees the taken buffers

        self._reserving = threading.Thread(target=make_room, daemon=True, name="reserve")
        self._reserving.start()
        return self._reserving

    def commit(self, buffer: Buffer, label: Label) -> None:
        if buffer.number is not None:
            self._ask({"verb": "commit", "buffer": buffer.number, "label": label._asdict()})

    def give_back(self) -> None:
        # A server that does not answer has ended, or frees the buffers when the connection closes.
        with contextlib.suppress(OSError):
            self._ask({"verb": "give back"})

    def keep(self, snapshots: Collection[SnapshotId]) -> None:
        self._ask({"verb": "keep", "snapshots": list(snapshots)})

    def stored(self) -> dict[int, Label]:
        labels = {}
        for number, found in self._listed().items():
            if label := found["label"]:
                files = tuple((rank, start, length) for rank, start, length in label["files"])
                labels[int(number)] = Label(SnapshotId(*label["snapshot"]), label["origin"], files)
        return labels

    def open(self, number: int) -> Tensor:
        found = self._listed().get(str(number))
        if found is None or found["label"] is None:
            raise OSError("the copy is gone")
        _, descriptor = self._ask({"verb": "open", "buffer": number})
        return self._map(number, descriptor, found["bytes"])

    def verify(self, number: int) -> None:
        copy = self.open(number)
        until_s = time.monotonic() + _ANSWER_S + len(copy) / _SLOWEST_HASH_BYTES_PER_S
        label: dict[str, Any] = {}
        while "sha256" not in label:
            label = self._listed().get(str(number), {}).get("label")
            if label is None:
                raise OSError("the copy is gone")
            if time.monotonic() > until_s:
                raise OSError("its digest is not known")
            if "sha256" not in label:
                time.sleep(_POLL_S)  # the copy is new, and its digest not ready
        copied = copy[: memory_server.num_labelled(label["files"])]
        if hashlib.sha256(copied.numpy().data).hexdigest() != label["sha256"]:
            raise OSError("its bytes are not those that were copied")

    def held_bytes(self) -> int:
        return sum(found["bytes"] for found in self._listed().values())

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._ask({"verb": "end"})
        self.close()

    def _listed(self) -> dict[str, Any]:
        try:
            answer, _ = self._ask({"verb": "list"})
        except OSError:
            return {}
        listed: dict[str, Any] = answer["buffers"]
        return listed

    def _map(self, number: int, descriptor: int | None, num_bytes: int) -> Tensor:
        if descriptor is None:
            raise OSError("an answer without memory")
        try:
            # Another server numbers its buffers anew, so the inode is compared too.
            inode = os.fstat(descriptor).st_ino
            if self._mapped.get(number, (None,))[0] != inode:
                # Populated at once: finding pages here is faster than during a copy, for which training waits.
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                _check_size(descriptor, num_bytes)
                memory = torch.frombuffer(mmap.mmap(descriptor, num_bytes, flags=flags), dtype=torch.uint8)
                if self._device.type == "cuda":
                    pin(memory, self._device)
                self._mapped[number] = inode, memory
            return self._mapped[number][1]
        finally:
            # A mapping keeps its memory without the descriptor, and every answer brings another descriptor.
            os.close(descriptor)

    def _ask(self, request: dict[str, Any], new_bytes: int = 0) -> tuple[dict[str, Any], int | None]:
        """Return the server's answer and any descriptor. Raises OSError."""
        limit_s = _ANSWER_S + new_bytes / _SLOWEST_BYTES_PER_S
        try:
            packet, descriptors = self._exchange(request, limit_s)
        except ConnectionError:
            # The server has ended. Another one may be running, or else this attempt starts one.
            packet, descriptors = self._exchange(request, limit_s)
        answer: dict[str, Any] = json.loads(packet)
        if "error" in answer:
            raise OSError(answer["error"])
        return answer, next(iter(descriptors), None)

    def _exchange(self, request: dict[str, Any], limit_s: float) -> tuple[bytes, list[int]]:
        if self._connection is None:
            self._connection = self._connect()
        try:
            self._connection.settimeout(limit_s)
            self._connection.send(json.dumps(request).encode())
            packet, descriptors, _, _ = socket.recv_fds(self._connection, memory_server.PACKET_BYTES, 1)
            if not packet:
                raise ConnectionResetError("the process that holds the node's memory has ended")
        except OSError:
            self.close()  # otherwise a late answer would be taken for that of the next request
            raise
        return packet, descriptors

    def _connect(self) -> socket.socket:
        # Packets keep their boundaries, so a message needs no length. Only a Unix socket can carry a descriptor.
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            try:
                connection.connect(f"\0{self._name}")
            except ConnectionRefusedError:
                # Not with `-m`, which would import this package and torch.
                command = [sys.executable, "-I", "-S", memory_server.__file__, self._name, *self._arguments]
                subprocess.run(command, check=False, timeout=_START_S, stdin=subprocess.DEVNULL)
                connection.connect(f"\0{self._name}")
            # Any user of the machine could have bound the name first.
            if (user := memory_server.user_of(connection)) != os.getuid():
                raise PermissionError(f"user {user} listens on its socket, not this run's user {os.getuid()}")
        except (OSError, subprocess.TimeoutExpired) as error:
            connection.close()
            raise OSError(f"no process to hold the node's memory: {error}") from error
        return connection

    def close(self) -> None:
        """Disconnect, and leave the copies to later workers."""
        self._mapped.clear()
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def open_memory(owner: Owner | None, key: str, uri: str, linger_s: float, device: torch.device) -> NodeMemory:
    """Return the memory for snapshots of the run at `uri`.

    Args:
        owner: the command that owns the run and this worker.
        key: secret of the run.
    """
    watched_pid = 0
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun is the parent of a rank. It restarts ranks, and the first rank owns the run each time.
        watched_pid = os.getppid()
    if owner is None or not key or not hasattr(os, "memfd_create"):
        return ProcessMemory()
    # A process that trains alone, by `fit`, would leave the copies unused.
    if not watched_pid and (owner.host, owner.pid) == (socket.gethostname(), os.getpid()):
        return ProcessMemory()
    return SharedMemory(memory_server.server_name(uri, key), watched_pid, linger_s, device)


def _check_size(descriptor: int, num_bytes: int) -> None:
    """Check that memory has the promised, fixed length. Raises OSError."""
    # A write behind the end of shared memory would kill this process by SIGBUS. Only the seal excludes a later cut.
    found_bytes = os.fstat(descriptor).st_size
    sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    if found_bytes < num_bytes or not sealed:
        raise OSError(f"the server gives {found_bytes} bytes, where {num_bytes} of fixed length are needed")
