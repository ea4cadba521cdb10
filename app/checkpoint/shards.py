"""What one rank holds of the state, as one safetensors file (https://github.com/huggingface/safetensors#format).

A tensor that is spread over ranks is in as many files; each says in its header where its piece belongs. So any number
of ranks can read what any other number wrote, and no rank needs another's word to write its own.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from app.checkpoint.state import Tensors, flatten
from app.errors import StorageError
from app.storage import Bytes, Store

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_CHUNK_BYTES = 2**24
_HEADER_BYTES = 2**16  # most headers, in one request
Place = tuple[int, ...]
Read = Callable[[int, int], bytes]  # of a file: from which byte on, and how many


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, held by this rank.

    shape: of the whole tensor. offset: where the box begins in it. sharded: other ranks hold other boxes of it.
    """

    name: str
    tensor: Tensor
    shape: Place
    offset: Place
    sharded: bool = False

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


def pieces_of(state: Tensors) -> list[Piece]:
    """What this rank holds of each tensor."""
    return [_piece(name, tensor) for name, tensor in flatten(state).items()]


def pieces_to_write(state: dict[str, Tensors], replicas: bool) -> list[Piece]:
    """What this rank's file has in it: its shards, and the tensors that every rank has where it is the one to write
    `replicas`. Of a tensor that holds nothing at all there is still its name."""
    held = [piece for piece in pieces_of(state) if piece.tensor.numel() or not math.prod(piece.shape)]
    return [piece for piece in held if replicas or piece.sharded]


def _piece(name: str, tensor: Any) -> Piece:
    if not hasattr(tensor, "to_local"):
        return Piece(name, tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim())
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Piece(name, tensor.detach().to_local(), tuple(tensor.shape), tuple(offset), sharded=True)


class Staged:
    """A copy of pieces in host memory, byte for byte as their file will be. Its memory is kept and used again."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self.num_bytes = 0  # of the file
        self._filling = threading.Lock()

    def reserve(self, pieces: Sequence[Piece]) -> None:
        """Makes room for the pieces, if there is none yet. From any thread; `fill` waits for it."""
        ordered = _in_order(pieces)
        num_bytes = len(_header_of(ordered)) + sum(piece.num_bytes for piece in ordered)
        with self._filling:
            if len(self._buffer) < num_bytes:  # else a copy may be in it that is still being written
                self._buffer = _new_buffer(ordered, num_bytes).zero_()  # which makes the system find the memory

    def fill(self, pieces: Sequence[Piece]) -> None:
        """Copies the pieces; when this returns, they may change."""
        with self._filling:
            self._fill(_in_order(pieces))

    def _fill(self, pieces: Sequence[Piece]) -> None:
        header = _header_of(pieces)
        at = len(header)
        self.num_bytes = at + sum(piece.num_bytes for piece in pieces)
        if len(self._buffer) < self.num_bytes:
            self._buffer = _new_buffer(pieces, self.num_bytes)
        self._buffer[:at] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        for piece in pieces:
            end = at + piece.num_bytes
            target = self._buffer[at:end].view(piece.tensor.dtype).view(piece.tensor.shape)
            target.copy_(piece.tensor, non_blocking=True)
            at = end
        if any(piece.tensor.is_cuda for piece in pieces):
            torch.cuda.synchronize()

    def file(self) -> Tensor:
        return self._buffer[: self.num_bytes]

    def chunks(self) -> Iterator[Bytes]:
        """The file, a few megabytes at a time."""
        data = memoryview(self.file().numpy().data)
        for start in range(0, len(data), _CHUNK_BYTES):
            yield data[start : start + _CHUNK_BYTES]


def _new_buffer(pieces: Iterable[Piece], num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=any(piece.tensor.is_cuda for piece in pieces))


def _in_order(pieces: Iterable[Piece]) -> list[Piece]:
    """Those of the widest numbers first, so that each begins where its type wants it."""
    return sorted(pieces, key=lambda piece: (-piece.tensor.element_size(), piece.name))


def _header_of(pieces: Iterable[Piece]) -> bytes:
    header: dict[str, object] = {}
    boxes: dict[str, tuple[Place, Place]] = {}
    at = 0
    for piece in pieces:
        end = at + piece.num_bytes
        dtype = _NAMES[piece.tensor.dtype]
        header[piece.name] = {"dtype": dtype, "shape": list(piece.tensor.shape), "data_offsets": [at, end]}
        boxes[piece.name] = piece.shape, piece.offset
        at = end
    header["__metadata__"] = {"format": "pt", "boxes": json.dumps(boxes)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class _Stored:
    """A piece in a file. start: the byte of the file where its numbers begin. box: of the whole tensor."""

    name: str
    start: int
    dtype: torch.dtype
    box: Place
    offset: Place
    shape: Place

    @property
    def row_bytes(self) -> int:
        """A number counts as one row."""
        return math.prod(self.box[1:]) * self.dtype.itemsize


class Filling:
    """Fills pieces in place, file by file, whatever boxes they and the files are cut into.

    Args:
        prefix: of the names in the files that are not passed over.
    """

    def __init__(self, pieces: Iterable[Piece], prefix: str = "") -> None:
        self._pieces = {piece.name: piece for piece in pieces}
        self._missing = {piece.name: piece.tensor.numel() for piece in self._pieces.values()}
        self._seen: set[str] = set()
        self._prefix = prefix

    def take(self, read: Read) -> None:
        """
        Raises:
            StorageError: the file holds another model's tensors.
        """
        parts = []
        for stored in _read_header(read, self._prefix):
            if stored.name not in self._pieces:
                raise StorageError(f"the checkpoint is of another model: {stored.name} is in it alone")
            self._seen.add(stored.name)
            parts += _overlap(stored, self._pieces[stored.name])
        if not parts:
            return
        first, stop = min(part.first for part in parts), max(part.stop for part in parts)
        wanted = sum(part.stop - part.first for part in parts)
        # One request for all of it where that is most of what lies between; a bucket takes long to answer each.
        data = read(first, stop - first) if 2 * wanted > stop - first else b""
        for part in parts:
            found = data[part.first - first : part.stop - first] or read(part.first, part.stop - part.first)
            part.fill(found)
            self._missing[part.name] -= part.target.numel()

    def finish(self) -> None:
        """
        Raises:
            StorageError: something of the pieces was in none of the files.
        """
        if absent := self._pieces.keys() - self._seen:
            raise StorageError(f"the checkpoint is of another model: it lacks {min(absent)}")
        for name, missing in self._missing.items():
            if missing:
                raise StorageError(f"the checkpoint lacks {missing} of the numbers of {name}")


@dataclass(frozen=True)
class _Part:
    """What a file has of a piece: so many bytes of whole rows, of which the target is a box."""

    name: str
    first: int
    stop: int
    dtype: torch.dtype
    rows: Place
    within: tuple[slice, ...]
    target: Tensor

    def fill(self, data: bytes) -> None:
        found = torch.frombuffer(bytearray(data), dtype=self.dtype).view(self.rows)
        self.target.copy_(found[self.within])


def _overlap(stored: _Stored, piece: Piece) -> list[_Part]:
    if stored.shape != piece.shape:
        raise StorageError(
            f"the checkpoint is of another model: {piece.name} is {list(stored.shape)} there, {list(piece.shape)} here"
        )
    offsets = list(zip(piece.offset, stored.offset, strict=True))
    first = [max(each) for each in offsets]
    last = [min(p + n, q + m) for (p, q), n, m in zip(offsets, piece.tensor.shape, stored.box, strict=True)]
    if any(low >= high for low, high in zip(first, last, strict=True)):
        return []
    here = tuple(slice(low - p, high - p) for low, high, (p, _) in zip(first, last, offsets, strict=True))
    there = tuple(slice(low - q, high - q) for low, high, (_, q) in zip(first, last, offsets, strict=True))
    low, high = (there[0].start, there[0].stop) if there else (0, 1)
    start = stored.start + low * stored.row_bytes
    rows = (high - low, *stored.box[1:]) if there else ()
    within = (slice(None), *there[1:]) if there else ()
    stop = start + (high - low) * stored.row_bytes
    return [_Part(piece.name, start, stop, stored.dtype, rows, within, piece.tensor[here])]


def load_pieces(store: Store, files: Iterable[str], pieces: Iterable[Piece], prefix: str = "") -> None:
    """Fills the pieces in place.

    Raises:
        StorageError: the files do not hold all of the pieces, or hold other tensors too.
    """
    filling = Filling(pieces, prefix)
    for file in files:
        filling.take(partial(store.read, file))
    filling.finish()


def whole_tensors(store: Store, files: Sequence[str], part: str) -> dict[str, Tensor]:
    """Those of one part of the state ("model", say), by the names that they have in it."""
    prefix = f"{part}."
    stored = [each for file in files for each in _read_header(partial(store.read, file), prefix)]
    whole = {each.name: torch.empty(each.shape, dtype=each.dtype) for each in stored}
    load_pieces(store, files, pieces_of(whole), prefix)
    return {name.removeprefix(prefix): tensor for name, tensor in whole.items()}


def _read_header(read: Read, prefix: str) -> Iterator[_Stored]:
    head = read(0, _HEADER_BYTES)
    length = int.from_bytes(head[:8], "little")
    if len(head) < 8 + length:
        head = read(0, 8 + length)
    header = json.loads(head[8 : 8 + length])
    boxes = json.loads(header.pop("__metadata__")["boxes"])
    for name, entry in header.items():
        if not name.startswith(prefix):
            continue
        shape, offset = map(tuple, boxes[name])
        start = 8 + length + entry["data_offsets"][0]
        yield _Stored(name, start, _DTYPES[entry["dtype"]], tuple(entry["shape"]), offset, shape)
