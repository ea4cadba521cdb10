"""Where a checkpoint can be interrupted: its operations on storage, as an honest run does them, and a process that is
killed at one of them. And what lies on storage then, read without the app."""

import hashlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from steadfast.checkpoint.writer import Writer
from steadfast.storage import LocalStore, Store
from steadfast.storage.jsonl import FileStream, read_lines

CHANGING = [verb for verb in vars(Store) if not verb.startswith("_") and verb not in ("uri", "list", "read")]


class Operation(NamedTuple):
    """number: of those of this rank. is_folder: what is to be changed is one."""

    rank: int
    number: int
    verb: str
    name: str
    is_folder: bool

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.verb} {self.name.removeprefix('checkpoints/')}"

    @property
    def has_middle(self) -> bool:
        """The deletion of a single file has none."""
        return self.verb != "delete" or self.is_folder


class Point(NamedTuple):
    operation: Operation
    moment: Literal["before", "half-way", "after"]


def points(operations: Iterable[Operation]) -> Iterator[Point]:
    """All there are. What is after an operation is before the next, so only the last one of a rank has an `after`."""
    last = {each.rank: each for each in operations}
    for each in operations:
        yield Point(each, "before")
        if each.has_middle:
            yield Point(each, "half-way")
        if each is last[each.rank]:
            yield Point(each, "after")


def record(log: Path) -> None:
    """A patch: each operation is written down before it is done."""

    stream = FileStream(log)

    def noted(operation: Operation, honest: Callable[..., None], store: LocalStore, *args: Any) -> None:
        stream.write([operation._asdict()])
        honest(store, *args)

    _around_each(noted)


def recorded(log: Path) -> list[Operation]:
    """Of the first checkpoint, and what was done to storage before it; rank by rank."""
    found = sorted(Operation(**line) for line in read_lines(LocalStore(log.parent), log.name))
    first = next(each for each in found if each.verb == "write")

    def within(operation: Operation) -> bool:
        return operation.verb != "write" or Path(operation.name).parent == Path(first.name).parent

    ranks = sorted({each.rank for each in found})
    return [each for rank in ranks for each in takewhile(within, (one for one in found if one.rank == rank))]


def kill_at(point: Point) -> None:
    """A patch: the process ends there as by a loss of its machine."""

    def fatal(operation: Operation, honest: Callable[..., None], store: LocalStore, *args: Any) -> None:
        if operation == point.operation:
            if point.moment == "half-way":
                _begin(operation, honest, store, *args)
            elif point.moment == "after":
                honest(store, *args)
            _die()
        honest(store, *args)

    _around_each(fatal)


def _begin(operation: Operation, honest: Callable[..., None], store: LocalStore, *args: Any) -> None:
    """Dies when half of it is done, unless it ends there by itself."""
    if operation.verb == "delete":
        honest(store, f"{operation.name}/{store.list(operation.name)[0]}")
    elif operation.verb == "write":
        _half(honest)(store, *args)
    else:
        LocalStore._write = _half(LocalStore._write)
        honest(store, *args)
        raise AssertionError(f"{operation.verb} writes no file of which there could be a half")


def _half(write: Callable[..., None]) -> Callable[..., None]:
    def half(store: LocalStore, name: str, parts: Iterable[bytes | memoryview], *mode: int) -> None:
        data = b"".join(parts)

        def first_half() -> Iterator[bytes]:
            yield data[: len(data) // 2]
            _die()

        write(store, name, first_half(), *mode)

    return half


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _around_each(act: Callable[..., None]) -> None:
    """`act` is called in the place of each verb that changes something. What a verb itself calls is a part of it."""
    numbers, inside = count(), threading.local()

    def replacement(verb: str, honest: Callable[..., None]) -> Callable[..., None]:
        def replaced(store: LocalStore, name: str, *args: Any) -> None:
            if getattr(inside, "one", False):
                honest(store, name, *args)
                return
            inside.one = True
            try:
                is_folder = bool(store.list(name))
                act(Operation(dist.get_rank(), next(numbers), verb, name, is_folder), honest, store, name, *args)
            finally:
                inside.one = False

        return replaced

    for verb in CHANGING:
        setattr(LocalStore, verb, replacement(verb, getattr(LocalStore, verb)))


def wait_for_each() -> None:
    """A patch: every checkpoint is on storage before the next step, so that none is left out."""
    honest = Writer.put

    def put(self: Writer, *args: Any) -> None:
        honest(self, *args)
        assert self.wait(lambda: None, 60)

    Writer.put = put  # type: ignore[assignment]


def newest_whole(checkpoints: Path) -> int:
    """The step of the newest checkpoint that is what was written and has not been given up; 0 where there is none."""
    return max((int(path.name[-8:]) for path in checkpoints.glob("step-????????") if is_whole(path)), default=0)


def is_whole(checkpoint: Path) -> bool:
    if checkpoint.with_name(f"{checkpoint.name}.quarantined.json").exists():
        return False
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_bytes())
    except (OSError, ValueError):
        return False
    signature = manifest.pop("sha256", "")
    if signature != hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest():
        return False
    return all(_is_whole_file(checkpoint / name, **said) for name, said in manifest["files"].items())


def _is_whole_file(path: Path, bytes: int, sha256: str) -> bool:
    data = path.read_bytes() if path.exists() else b""
    return len(data) == bytes and hashlib.sha256(data).hexdigest() == sha256


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def remove(path: Path) -> None:
    path.unlink()


DAMAGES = (truncate, flip_a_bit, remove)
