"""What one rank holds of the state, as one safetensors file (https://github.com/huggingface/safetensors#format).

A tensor that is spread over ranks is in as many files; each says in its header where its piece belongs. So any number
of ranks can read what any other number wrote, and no rank needs another's word to write its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_CHUNK_BYTES = 2**24
Place = tuple[int, ...]


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


def pieces_of(state: dict[str, Tensors]) -> list[Piece]:
    """What this rank holds of each tensor."""
    return [_piece(name, tensor) for name, tensor in flatten(state).items()]


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
        self._header = b""
        self._num_bytes = 0

    def fill(self, pieces: Iterable[Piece]) -> None:
        """Copies the pieces; when this returns, they may change."""
        # Those of the widest numbers first, so that each begins where its type wants it.
        ordered = sorted(pieces, key=lambda piece: (-piece.tensor.element_size(), piece.name))
        self._num_bytes = sum(piece.num_bytes for piece in ordered)
        on_device = any(piece.tensor.is_cuda for piece in ordered)
        if len(self._buffer) < self._num_bytes:
            self._buffer = torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=on_device)
        header: dict[str, object] = {}
        boxes: dict[str, tuple[Place, Place]] = {}
        at = 0
        for piece in ordered:
            end = at + piece.num_bytes
            target = self._buffer[at:end].view(piece.tensor.dtype).view(piece.tensor.shape)
            target.copy_(piece.tensor, non_blocking=True)
            dtype = _NAMES[piece.tensor.dtype]
            header[piece.name] = {"dtype": dtype, "shape": list(piece.tensor.shape), "data_offsets": [at, end]}
            boxes[piece.name] = piece.shape, piece.offset
            at = end
        header["__metadata__"] = {"format": "pt", "boxes": json.dumps(boxes)}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        if on_device:
            torch.cuda.synchronize()

    @property
    def num_bytes(self) -> int:
        """Of the file."""
        return len(self._header) + self._num_bytes

    def chunks(self) -> Iterator[Bytes]:
        """The file, a few megabytes at a time."""
        yield self._header
        body = memoryview(self._buffer.numpy().data)
        for start in range(0, self._num_bytes, _CHUNK_BYTES):
            yield body[start : min(start + _CHUNK_BYTES, self._num_bytes)]


@dataclass(frozen=True)
class _Stored:
    """A piece in a file. start: the byte of the file where its numbers begin. box: of the whole tensor."""

    file: str
    start: int
    dtype: torch.dtype
    box: Place
    offset: Place
    shape: Place

    def read(self, store: Store, first: int, stop: int) -> Tensor:
        """Its rows from `first` to `stop`; a number counts as one row."""
        rows = self.box[0] if self.box else 1
        row_bytes = math.prod(self.box) * self.dtype.itemsize // rows
        data = store.read(self.file, self.start + first * row_bytes, (stop - first) * row_bytes)
        return torch.frombuffer(bytearray(data), dtype=self.dtype).view(stop - first, *self.box[1:])


def load_pieces(store: Store, files: Iterable[str], pieces: Iterable[Piece]) -> None:
    """Fills `pieces` in place, whatever boxes they and the files are cut into.

    Raises:
        StorageError: the files do not hold all of the pieces, or hold other tensors too.
    """
    stored = _stored_in(store, files)
    wanted = {piece.name: piece for piece in pieces}
    if odd := sorted(wanted.keys() ^ stored.keys()):
        lacking = "is not in the checkpoint" if odd[0] in wanted else "is in the checkpoint alone"
        raise StorageError(f"the checkpoint is of another model: {odd[0]} {lacking}, and {len(odd) - 1} more")
    for name, piece in wanted.items():
        _fill(store, piece, stored[name])


def whole_tensors(store: Store, files: Iterable[str], part: str) -> dict[str, Tensor]:
    """Those of one part of the state ("model", say), by the names that they have in it."""
    whole: dict[str, Tensor] = {}
    for name, stored in _stored_in(store, files).items():
        if name.startswith(f"{part}."):
            tensor = torch.empty(stored[0].shape, dtype=stored[0].dtype)
            _fill(store, Piece(name, tensor, stored[0].shape, (0,) * tensor.dim()), stored)
            whole[name.removeprefix(f"{part}.")] = tensor
    return whole


def _stored_in(store: Store, files: Iterable[str]) -> dict[str, list[_Stored]]:
    stored: dict[str, list[_Stored]] = {}
    for file in files:
        for name, box in _read_header(store, file):
            stored.setdefault(name, []).append(box)
    return stored


def _fill(store: Store, piece: Piece, stored: list[_Stored]) -> None:
    there = stored[0].shape
    if there != piece.shape:
        raise StorageError(
            f"the checkpoint is of another model: {piece.name} is {list(there)} there, {list(piece.shape)} here"
        )
    filled, shape = 0, tuple(piece.tensor.shape)
    for each in stored:
        first = tuple(map(max, piece.offset, each.offset))
        last = tuple(min(p + n, q + m) for p, n, q, m in zip(piece.offset, shape, each.offset, each.box, strict=True))
        if any(low >= high for low, high in zip(first, last, strict=True)):
            continue
        within = [slice(low - q, high - q) for low, high, q in zip(first, last, each.offset, strict=True)]
        rows = (within[0].start, within[0].stop) if within else (0, 1)
        found = each.read(store, *rows)
        found = found[(slice(None), *within[1:])] if within else found.view(())
        here = tuple(slice(low - p, high - p) for low, high, p in zip(first, last, piece.offset, strict=True))
        piece.tensor[here].copy_(found)
        filled += found.numel()
    if filled != piece.tensor.numel():
        raise StorageError(f"the checkpoint holds {filled} of the {piece.tensor.numel()} numbers of {piece.name}")


def _read_header(store: Store, file: str) -> Iterator[tuple[str, _Stored]]:
    length = int.from_bytes(store.read(file, 0, 8), "little")
    header = json.loads(store.read(file, 8, length))
    boxes = json.loads(header.pop("__metadata__")["boxes"])
    for name, entry in header.items():
        shape, offset = map(tuple, boxes[name])
        start = 8 + length + entry["data_offsets"][0]
        yield name, _Stored(file, start, _DTYPES[entry["dtype"]], tuple(entry["shape"]), offset, shape)
