"""A rank's part of the state as a safetensors file.

Any part of such files can be read back.
"""

# A tensor that is sharded over ranks is in as many files. Each file's header describes the position of its shard, so
# any number of ranks can read the files of any other number. The format:
# https://github.com/huggingface/safetensors#format
#
# DCP's HuggingFaceStorageWriter, which writes such files too, is not used: its planner needs collectives in every save,
# so a dead rank blocks all others, and training waits 5.8 times as long for DCP's `async_save` as for this module
# (tests/benchmarks/README.md). Here every rank writes its file without waiting for other ranks.

from __future__ import annotations

import json
import math
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from steadfast.checkpoint.pinned import pin
from steadfast.checkpoint.state import Tensors, flatten
from steadfast.errors import StorageError
from steadfast.parallel.dtensor import is_sharded, is_split, offset_of
from steadfast.storage import Bytes, Read
from steadfast.world.runtime import World

# Names of types in the format. safetensors has such a table too, but it is private.
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FLOATS |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
_SIGNED = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
_UNSIGNED = {"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8}
_DTYPES = {**_FLOATS, **_SIGNED, **_UNSIGNED, "BOOL": torch.bool}
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_CHUNK_BYTES = 2**24
_NO_NAME = "\0"  # prefix of no name
_HEADER_BYTES = 2**16  # enough for most headers in one request
_MOST_HEADER_BYTES = 10**8  # the limit of safetensors itself


@dataclass(frozen=True)
class Shard:
    """The part of a tensor that one rank holds."""

    name: str
    tensor: Tensor  # on the meta device if another stage holds the tensor
    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]  # first indices of this part in the whole tensor
    sharded: bool = False  # whether ranks hold different parts; otherwise each holds the whole tensor
    split: bool = False  # whether ranks that differ on the tensor axis alone hold different parts


def shards_of(state: Tensors) -> list[Shard]:
    """Return this rank's part of each tensor, by reference."""
    return [_shard(name, tensor) for name, tensor in flatten(state).items()]


def shards_to_write(state: Tensors, world: World) -> list[Shard]:
    """Return the shards for this rank's file, each for one of the ranks that hold the same one."""
    shards = []
    for shard in shards_of(state):
        is_mine = shard.split or (world.tensor == 0 and (shard.sharded or world.shard == 0))
        # Whole empty tensors are written, so that their names are in a file; empty parts of other tensors are not.
        is_empty_part = shard.tensor.numel() == 0 and math.prod(shard.shape) > 0
        if is_mine and not (is_empty_part or shard.tensor.is_meta):
            shards.append(shard)
    return shards


def _shard(name: str, tensor: Any) -> Shard:
    shape = tuple(tensor.shape)
    # Another stage holds the tensor, and this rank nothing of it.
    if tensor.is_meta:
        return Shard(name, tensor, shape, (0,) * len(shape), sharded=True)
    if not is_sharded(tensor):
        return Shard(name, tensor.detach(), shape, (0,) * len(shape))
    return Shard(name, tensor.detach().to_local(), shape, offset_of(tensor), sharded=True, split=is_split(tensor))


# A resume may add or remove hooks and change the precision, so these tensors may be missing or superfluous.
_OPTIONAL = ("hooks.", "precision.", "requires_grad.")


def optional_for(shards: Iterable[Shard]) -> tuple[str, ...]:
    """Return the prefixes of names that a checkpoint may have beside these shards, or lack."""
    elsewhere = [shard.name.removeprefix("model.") for shard in shards if shard.tensor.is_meta]
    return (*_OPTIONAL, *(f"optimizer.{name}." for name in elsewhere))


class StagingBuffer:
    """Copy of shards in host memory, in the layout of their file.

    The memory is reused.
    """

    def __init__(self) -> None:
        self.num_bytes = 0  # of the file
        self._pieces: list[tuple[str, int, int]] = []  # name, first byte and end of each shard
        self._memory = torch.empty(0, dtype=torch.uint8)
        # `reserve` runs in a thread of its own, and may still allocate when the first `fill` comes.
        self._lock = threading.Lock()

    def reserve(self, shards: Iterable[Shard]) -> None:
        """Allocate memory for the shards ahead of `fill`, in any thread."""
        layout = FileLayout.of(shards)
        with self._lock:
            # Memory of sufficient size is kept, because it may hold a copy that is still being written.
            if len(self._memory) < layout.num_bytes:
                self._allocate(layout)
                self._memory.zero_()  # the system provides memory only when it is touched

    def fill(self, shards: Iterable[Shard]) -> None:
        """Copy the shards, which may change afterwards."""
        layout = FileLayout.of(shards)
        with self._lock:
            self.num_bytes = layout.num_bytes
            # Not the layout, whose tensors would outlive their model.
            self._pieces = layout.pieces()
            if len(self._memory) < layout.num_bytes:
                self._allocate(layout)
            layout.fill(self._memory)

    def copies(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the copied bytes of each shard."""
        for name, start, stop in self._pieces:
            yield name, self._memory[start:stop]

    def chunks(self) -> Iterator[Bytes]:
        """Yield the file in chunks of a few megabytes."""
        data = memoryview(self._memory[: self.num_bytes].numpy().data)
        for start in range(0, len(data), _CHUNK_BYTES):
            yield data[start : start + _CHUNK_BYTES]

    def _allocate(self, layout: FileLayout) -> None:
        self._memory = torch.empty(layout.num_bytes, dtype=torch.uint8)
        if layout.device is not None:
            pin(self._memory, layout.device)  # not by torch, which takes a power of two


@dataclass(frozen=True)
class FileLayout:
    """Layout of the file with one rank's shards."""

    shards: list[Shard]  # in the order of the file
    header: bytes  # beginning of the file, with the name, dtype and position of each shard
    num_bytes: int  # of the whole file

    @classmethod
    def of(cls, shards: Iterable[Shard]) -> Self:
        """Return the layout of shards without changing the shards."""
        # The widest numbers come first, so that each shard begins at a multiple of its width, as views require.
        ordered = sorted(shards, key=lambda shard: (-shard.tensor.element_size(), shard.name))
        header: dict[str, object] = {}
        boxes: dict[str, object] = {}
        start = 0
        for shard in ordered:
            stop = start + shard.tensor.nbytes
            dtype = DTYPE_NAMES[shard.tensor.dtype]
            header[shard.name] = {"dtype": dtype, "shape": list(shard.tensor.shape), "data_offsets": [start, stop]}
            boxes[shard.name] = (shard.shape, shard.offset)
            start = stop
        # The format allows only strings here.
        header["__metadata__"] = {"format": "pt", "boxes": json.dumps(boxes)}
        text = json.dumps(header).encode()
        # The format allows spaces here. They move the first shard to a multiple of 8 bytes, the widest type's width.
        text += b" " * (-len(text) % 8)
        return cls(ordered, len(text).to_bytes(8, "little") + text, 8 + len(text) + start)

    @property
    def device(self) -> torch.device | None:
        """Return the GPU that holds shards, None if the host holds all."""
        for shard in self.shards:
            if shard.tensor.is_cuda:
                return shard.tensor.device
        return None

    def pieces(self) -> list[tuple[str, int, int]]:
        """Return the name of each shard, and where its bytes begin and end."""
        ends = list(accumulate((shard.tensor.nbytes for shard in self.shards), initial=len(self.header)))
        return [(shard.name, *piece) for shard, piece in zip(self.shards, pairwise(ends), strict=True)]

    def fill(self, memory: Tensor) -> None:
        """Write the file to the beginning of `memory`, (n,) uint8.

        The shards may change afterwards.
        """
        start = len(self.header)
        # `frombuffer` warns of `bytes`, which cannot be written to.
        memory[:start] = torch.frombuffer(bytearray(self.header), dtype=torch.uint8)
        for shard, (_, first, stop) in zip(self.shards, self.pieces(), strict=True):
            target = memory[first:stop].view(shard.tensor.dtype).view(shard.tensor.shape)
            target.copy_(shard.tensor, non_blocking=True)
        # One wait at the end lets the copies follow each other without the host.
        if self.device is not None:
            torch.cuda.synchronize()


def reader_of(file: Tensor) -> Read:
    data = memoryview(file.numpy().data)
    return lambda start, num_bytes: bytes(data[start : start + num_bytes])


def _reader_of_bytes(data: bytes) -> Read:
    return lambda start, num_bytes: data[start : start + num_bytes]


def read_header(read: Read) -> bytes:
    """Read the header of a file, and the eight bytes of length before the header."""
    head = read(0, _HEADER_BYTES)
    data_start = 8 + int.from_bytes(head[:8], "little")
    if len(head) < data_start <= _MOST_HEADER_BYTES:
        head = read(0, data_start)
    return head[:data_start]


def with_header(read: Read, header: bytes) -> Read:
    """Return a reader of a file whose header has been read."""
    # Only the header begins at 0, no data.
    return lambda start, num_bytes: header[:num_bytes] if start == 0 else read(start, num_bytes)


def _read_header(read: Read, prefix: str) -> Iterator[tuple[Shard, int]]:
    """Yield a file's shards, without memory, and their first bytes."""
    head = read_header(read)
    data_start = len(head)
    # A file of this program reads back without errors, because its digest was checked. Any error means a foreign file.
    try:
        header = json.loads(head[8:data_start])
        boxes = json.loads(header.pop("__metadata__")["boxes"])
        found = [_shard_of(name, entry, boxes[name]) for name, entry in header.items() if name.startswith(prefix)]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
        why = f"{type(error).__name__}: {error}"[:200]
        raise StorageError(f"the checkpoint has a file that no run has written: {why}") from error
    for shard, start in found:
        yield shard, data_start + start


def _shard_of(name: str, entry: dict[str, Any], box: Any) -> tuple[Shard, int]:
    """Return a header's entry as a shard without memory, with its first byte."""
    shape, offset = box
    start, stop = entry["data_offsets"]
    tensor = torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]], device="meta")
    # A foreign file may have lengths that differ. The next line records that, so `zip` need not raise.
    lies_within = len(offset) == len(shape) == tensor.dim()
    for first, own, whole in zip(offset, tensor.shape, shape, strict=False):
        lies_within = lies_within and 0 <= first <= first + own <= whole
    if not (0 <= start <= stop and tensor.nbytes == stop - start and lies_within):
        raise ValueError(f"{name} does not fit its place")
    return Shard(name, tensor, tuple(shape), tuple(offset)), start


class _Overlap(NamedTuple):
    """Overlap of a file with a shard: a `part` of `rows`.

    The rows begin at byte `start` of the file.
    """

    start: int
    rows: Tensor  # on the meta device
    part: tuple[slice, ...]
    target: Tensor


def _overlap(stored: Shard, start: int, shard: Shard) -> _Overlap | None:
    """Return the overlap of a stored shard with one to fill."""
    if stored.shape != shard.shape:
        raise StorageError(
            f"the checkpoint is of another model: {shard.name} is {list(stored.shape)} there, {list(shard.shape)} here"
        )
    if shard.tensor.is_meta:
        return None
    if not shard.shape:  # a single number
        return _Overlap(start, stored.tensor, (), shard.tensor)
    here: list[slice] = []
    there: list[slice] = []
    for dim, (ours, theirs) in enumerate(zip(shard.offset, stored.offset, strict=True)):
        first = max(ours, theirs)
        stop = min(ours + shard.tensor.shape[dim], theirs + stored.tensor.shape[dim])
        if first >= stop:
            return None
        here.append(slice(first - ours, stop - ours))
        there.append(slice(first - theirs, stop - theirs))
    # Only whole rows are contiguous in a file, so whole rows are read.
    start += stored.tensor[: there[0].start].nbytes
    return _Overlap(start, stored.tensor[there[0]], (slice(None), *there[1:]), shard.tensor[tuple(here)])


class Request(NamedTuple):
    """A range of bytes in a file."""

    start: int
    num_bytes: int


def total_bytes(requests: Iterable[Request]) -> int:
    return sum(request.num_bytes for request in requests)


def _requests(overlaps: Sequence[_Overlap]) -> list[Request]:
    """Return the byte ranges to read for ordered overlaps."""
    wanted = [Request(overlap.start, overlap.rows.nbytes) for overlap in overlaps]
    if not wanted:
        return []
    first, last = wanted[0], wanted[-1]
    all_between = Request(first.start, last.start + last.num_bytes - first.start)
    # A bucket takes long for each request, so one request reads everything if most of the range is needed.
    if 2 * total_bytes(wanted) > all_between.num_bytes:
        return [all_between]
    return wanted


def _copy(overlaps: Sequence[_Overlap], read: Read) -> None:
    """Copy overlaps, which are in file order, to their targets."""
    waiting = deque(overlaps)
    for request in _requests(overlaps):
        data = read(*request)
        while waiting and waiting[0].start < request.start + request.num_bytes:
            overlap = waiting.popleft()
            at = overlap.start - request.start
            found = bytearray(data[at : at + overlap.rows.nbytes])
            rows = torch.frombuffer(found, dtype=overlap.rows.dtype).view(overlap.rows.shape)
            overlap.target.copy_(rows[overlap.part])


def header_of(file: Tensor) -> bytes:
    """Return the header of a file, (n,) uint8, as bytes."""
    data = memoryview(file.numpy().data)
    return bytes(data[: 8 + int.from_bytes(data[:8], "little")])


def names_in(headers: Iterable[bytes]) -> set[str]:
    """Return the names of all shards in the files with these headers."""
    names: set[str] = set()
    for header in headers:
        names.update(shard.name for shard, _ in _read_header(_reader_of_bytes(header), ""))
    return names


def requests_for(shards: Iterable[Shard], header: bytes) -> list[Request]:
    """Return the byte ranges that `load_shards` will read after the header.

    Raises:
        StorageError: the shards and the file do not belong to the same state.
    """
    targets = {shard.name: shard for shard in shards}
    overlaps = []
    for stored, start in _read_header(_reader_of_bytes(header), ""):
        if stored.name in targets and (overlap := _overlap(stored, start, targets[stored.name])):
            overlaps.append(overlap)
    return _requests(overlaps)


def load_shards(
    files: Iterable[Read], shards: Iterable[Shard], prefix: str = "", optional: str | tuple[str, ...] = _NO_NAME
) -> None:
    """Fill shards in place from files of any sharding.

    Names without `prefix` are ignored. Names that begin with `optional` may exist only in the shards or only in the
    files.

    Raises StorageError if the files lack parts of the shards, or hold other tensors.
    """
    targets = {shard.name: shard for shard in shards}
    num_filled: dict[str, int] = {}
    seen: set[tuple[str, tuple[int, ...]]] = set()  # each stage writes the tensors that all of them hold
    for read in files:
        overlaps: list[_Overlap] = []
        for stored, start in _read_header(read, prefix):
            if stored.name not in targets:
                if stored.name.startswith(optional):
                    continue
                raise StorageError(f"the checkpoint is of another model: {stored.name} is in it alone")
            # The files hold different parts of a tensor, so its numbers are counted over all files. A tensor of which
            # this rank needs nothing counts as found too.
            num_filled.setdefault(stored.name, 0)
            overlap = _overlap(stored, start, targets[stored.name])
            if overlap is not None and (stored.name, stored.offset) not in seen:
                seen.add((stored.name, stored.offset))
                overlaps.append(overlap)
                num_filled[stored.name] += overlap.target.numel()
        if overlaps:
            _copy(overlaps, read)

    for name in sorted(targets.keys() - num_filled.keys()):
        if not name.startswith(optional):
            raise StorageError(f"the checkpoint is of another model: it lacks {name}")
    for name, num in num_filled.items():
        num_missing = targets[name].tensor.numel() - num
        if num_missing and not targets[name].tensor.is_meta:
            raise StorageError(f"the checkpoint lacks {num_missing} of the numbers of {name}")


def whole_tensors(files: Sequence[Read], part: str) -> dict[str, Tensor]:
    """Return the whole tensors of one part of the state ("model")."""
    prefix = f"{part}."
    whole: dict[str, Tensor] = {}
    for read in files:
        for stored, _ in _read_header(read, prefix):
            # The header gives the shape of the whole tensor, of which a foreign file need not hold a part.
            try:
                whole[stored.name] = torch.empty(stored.shape, dtype=stored.tensor.dtype)
            except RuntimeError as error:
                raise StorageError(f"{stored.name} of shape {list(stored.shape)} does not fit into memory") from error
    load_shards(files, shards_of(whole), prefix)
    return {name.removeprefix(prefix): tensor for name, tensor in whole.items()}
