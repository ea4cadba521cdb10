"""Samples in shards: Parquet files, JSON lines, and the tars of WebDataset.

An index holds the position of each sample, so samples can be read in any order. The index is made once, and kept where
runs are stored. Samples are read in blocks: row groups of Parquet, or a few neighbouring samples. A process that takes
few samples of each block reads them alone.
"""

import hashlib
import io
import json
import tarfile
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pyarrow import Array, ChunkedArray, FixedShapeTensorType, fs, parquet, types

from steadfast.backoff import delays
from steadfast.config import ShardsSource
from steadfast.data.extras import import_extra
from steadfast.data.order import WINDOW_BLOCKS
from steadfast.errors import ConfigError, DataError
from steadfast.run.directory import place_of_data, runs_root
from steadfast.storage import arrow_filesystem, open_store

Int64s = NDArray[np.int64]

_SUFFIXES = {"parquet": (".parquet",), "jsonl": (".jsonl", ".ndjson"), "webdataset": (".tar",)}
# Largest block, where the files have no blocks of their own.
_BLOCK_SAMPLES = 256
_BLOCK_BYTES = 2**22
_BUFFER_BYTES = 2**20  # of a tar while its index is made
_REQUEST_BYTES = 2**18  # a request takes about as long as reading so many bytes
_REPETITIONS = 6  # attempts after the first one
_THREADS = 4  # that read at the same time
_OPEN_FILES = 64  # a process may have about a thousand files open
_PROGRESS_S = 5.0
_IMAGES = ("jpg", "jpeg", "png", "webp")
TUPLES = b"steadfast.tuples"  # metadata of a Parquet file whose samples are tuples


class _Index(NamedTuple):
    """Positions of the samples of one shard.

    Attributes:
        places: where each sample begins, and where the last one ends, in bytes; of Parquet only the number of samples.
        blocks: number of the first sample of each block.
        num_samples: number of samples.
        columns: of Parquet, name and type of each column that is read.
    """

    places: Int64s
    blocks: Int64s
    num_samples: int
    columns: NDArray[np.str_] = np.array([], np.str_)


class _Piece(NamedTuple):
    """Samples that are read together, of one shard."""

    shard: int
    first: int
    stop: int


class _Format(Protocol):
    """Format of a file."""

    def index(self, file: Any, name: str) -> _Index:
        """Return the index of an open file. Raises DataError if the file is damaged."""
        ...

    def open(self, file: Any) -> Any:
        """Return a file for `read`."""
        ...

    def read(self, opened: Any, index: _Index, first: int, stop: int) -> Any:
        """Return the content of a block of samples."""
        ...

    def samples(self, block: Any, numbers: list[int]) -> list[Any]:
        """Return samples of a block, in the order of `numbers`.

        Raises DataError, whose message continues the name of the sample.
        """
        ...


class Shards:
    """Map-style dataset of the samples of all shards in a folder, in the order of their names.

    A sample is a mapping of names to values, or a tuple if `steadfast index` has written tuples.

    Args:
        config: the section.
        key: of the section, for messages.

    Attributes:
        is_augmented: as in `Dataset`.
        blocks: id of the first sample of each block.
        digest: identifies the names, sizes and lengths of the shards.

    Raises:
        DataError: there are no shards, or one is damaged or empty.
    """

    is_augmented = False

    def __init__(self, config: ShardsSource, key: str) -> None:
        self._config = config
        self._key = key
        self._format = _formats[config.kind](config, key)
        store = open_store(place_of_data(config.path))
        self._names = [name for name in store.list("") if name.endswith(_SUFFIXES[config.kind])]
        if not self._names:
            suffixes = " or ".join(f"*{suffix}" for suffix in _SUFFIXES[config.kind])
            raise DataError(f"{key}.path: {config.path} is no folder with {suffixes}")
        files, self._folder = arrow_filesystem(store)
        self._is_local = files is None
        self._files = files or fs.LocalFileSystem()
        self._can_read_alone = config.kind != "parquet"  # single samples; of Parquet only row groups
        # In other orders the next sample is rarely of the same block.
        self._reads_blocks = getattr(config, "order", "blocks") in ("blocks", "sequential") or not self._can_read_alone
        self._open: OrderedDict[tuple[int, int], Any] = OrderedDict()  # by shard and thread
        self._blocks: OrderedDict[_Piece, Any] = OrderedDict()
        self._taken: Counter[_Piece] = Counter()  # number of samples taken of each block in `_blocks`
        # Bytes, samples, and samples taken of each of the last dropped blocks; empty for Parquet.
        self._dropped: deque[tuple[int, int, int]] = deque(maxlen=2 * WINDOW_BLOCKS)
        self._indices = self._read_indices()
        counts = [index.num_samples for index in self._indices]
        self._starts = np.cumsum([0, *counts])
        shifted = [start + index.blocks for start, index in zip(self._starts, self._indices, strict=False)]
        self.blocks: Int64s = np.concatenate(shifted)
        self._stops = np.append(self.blocks[1:], self._starts[-1])
        listed = [f"{name} {size} {count}" for name, size, count in zip(self._names, self._sizes, counts, strict=True)]
        self.digest = hashlib.sha256("\n".join(listed).encode()).hexdigest()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int, /) -> Any:
        [sample] = self.__getitems__([index])
        return sample

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several samples. A DataLoader calls this method too."""
        wanted: dict[_Piece, list[int]] = {}  # for each piece, positions in `indices`
        for position, piece in enumerate(self._pieces(indices)):
            wanted.setdefault(piece, []).append(position)
        # Blocks in memory come first, because reading other blocks may drop them.
        pieces = sorted(wanted, key=lambda piece: (piece not in self._blocks, piece))
        samples: list[Any] = [None] * len(indices)
        # A few pieces at a time, because memory holds the blocks of the window besides.
        for first in range(0, len(pieces), _THREADS):
            found = self._read(pieces[first : first + _THREADS])
            if self._reads_blocks:
                self._keep({piece: (content, len(wanted[piece])) for piece, content in found.items()})
            for piece, content in found.items():
                positions = wanted[piece]
                decoded = self._decoded(piece, content, [indices[position] for position in positions])
                for position, sample in zip(positions, decoded, strict=True):
                    samples[position] = sample
        return samples

    def __getstate__(self) -> dict[str, Any]:
        # Loader processes open the files again.
        return {**self.__dict__, "_open": OrderedDict(), "_blocks": OrderedDict(), "_taken": Counter()}

    def _pieces(self, indices: Sequence[int]) -> Iterator[_Piece]:
        """Yield for each sample the piece to read: its block, or the sample alone."""
        shards = (np.searchsorted(self._starts, indices, side="right") - 1).tolist()
        if not self._reads_blocks:
            return (_Piece(shard, index, index + 1) for shard, index in zip(shards, indices, strict=True))
        blocks = np.searchsorted(self.blocks, indices, side="right") - 1
        firsts, stops = self.blocks[blocks].tolist(), self._stops[blocks].tolist()
        return map(_Piece, shards, firsts, stops)

    def _read(self, pieces: list[_Piece]) -> dict[_Piece, Any]:
        """Return the content of each piece."""
        found = {piece: self._blocks[piece] for piece in pieces if piece in self._blocks}
        missing = [piece for piece in pieces if piece not in found]
        # Arrow reads and decodes without Python's lock. Each thread has files of its own.
        if len(missing) > 1:
            with ThreadPoolExecutor(_THREADS) as threads:
                contents = list(threads.map(self._read_piece, missing, count()))
        else:
            contents = list(map(self._read_piece, missing, count()))
        return found | dict(zip(missing, contents, strict=True))

    def _keep(self, found: dict[_Piece, tuple[Any, int]]) -> None:
        """Keep the newest blocks, or give up reading blocks if this process takes few samples of each.

        Args:
            found: content of each block, and the number of samples taken now.
        """
        for piece, (content, taken) in found.items():
            self._blocks[piece] = content
            self._blocks.move_to_end(piece)
            self._taken[piece] += taken
        # The samples of so many blocks are shuffled together. Fewer blocks would be read again and again.
        while len(self._blocks) > WINDOW_BLOCKS:
            piece, _ = self._blocks.popitem(last=False)
            taken = self._taken.pop(piece)
            if self._can_read_alone:
                self._dropped.append((self._num_bytes(piece), piece.stop - piece.first, taken))
        if len(self._dropped) == self._dropped.maxlen:
            num_bytes, num_samples, num_taken = map(sum, zip(*self._dropped, strict=True))
            if num_bytes / num_taken > 2 * (num_bytes / num_samples + _REQUEST_BYTES):
                self._reads_blocks = False
                self._blocks.clear()
                self._taken.clear()

    def _num_bytes(self, piece: _Piece) -> int:
        places, start = self._indices[piece.shard].places, int(self._starts[piece.shard])
        return int(places[piece.stop - start] - places[piece.first - start])

    def _read_piece(self, piece: _Piece, thread: int) -> Any:
        try:
            return self._repeated(lambda: self._read_once(piece, thread))
        except Exception as error:
            start = int(self._starts[piece.shard])
            name = f"samples {piece.first - start} to {piece.stop - 1 - start} of {self._names[piece.shard]}"
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError) and not self._is_local:
                raise DataError(f"{self._key}: {name} cannot be read: {self._unreachable(error)}") from error
            self._refuse(name, error)

    def _repeated(self, read: Callable[[], Any]) -> Any:
        """Call `read`, after an OSError of a bucket again, because a network fails now and then."""
        waits_s = islice(delays(0.2, 5.0, jitter=0.5), 0 if self._is_local else _REPETITIONS)
        while True:
            try:
                return read()
            except FileNotFoundError:
                raise
            except OSError:
                wait_s = next(waits_s, None)
                if wait_s is None:
                    raise
                time.sleep(wait_s)

    def _read_once(self, piece: _Piece, thread: int) -> Any:
        shard = piece.shard
        # After an error the file is opened anew.
        opened = self._open.pop((shard, thread), None) or self._format.open(self._file(self._names[shard]))
        start = int(self._starts[shard])
        content = self._format.read(opened, self._indices[shard], piece.first - start, piece.stop - start)
        self._open[shard, thread] = opened
        if len(self._open) > _OPEN_FILES:
            self._open.popitem(last=False)  # closed with its last reference
        return content

    def _decoded(self, piece: _Piece, content: Any, indices: list[int]) -> list[Any]:
        """Return samples of a piece."""
        try:
            return self._format.samples(content, [index - piece.first for index in indices])
        except ConfigError:  # a package is missing
            raise
        except Exception as error:
            if len(indices) > 1:
                # One by one, so that the error names the sample.
                return [sample for index in indices for sample in self._decoded(piece, content, [index])]
            name = f"sample {indices[0] - int(self._starts[piece.shard])} of {self._names[piece.shard]}"
            if isinstance(error, DataError):
                raise DataError(f"{self._key}: {name} {error}") from error
            self._refuse(name, error)

    def _refuse(self, name: str, error: Exception) -> NoReturn:
        raise DataError(
            f"{self._key}: {name} cannot be read ({error}); the file may have changed since its index was made: delete "
            f"{_folder_of_indices()} and give the command again"
        ) from error

    def _unreachable(self, error: OSError) -> str:
        if self._is_local or isinstance(error, FileNotFoundError):
            return str(error)
        return f"{error}, after {_REPETITIONS} more attempts; is the bucket reachable?"

    def _file(self, name: str) -> Any:
        return self._files.open_input_file(f"{self._folder}/{name}")

    def _read_indices(self) -> list[_Index]:
        paths = [f"{self._folder}/{name}" for name in self._names]
        try:
            infos = self._repeated(lambda: self._files.get_file_info(paths))
        except OSError as error:
            raise DataError(
                f"{self._key}.path: {self._config.path} cannot be read: {self._unreachable(error)}"
            ) from error
        self._sizes = [info.size for info in infos]
        told_s = time.monotonic()
        found = []
        for number, (name, info) in enumerate(zip(self._names, infos, strict=True)):
            # The index of Parquet includes a check of the columns.
            columns = self._config.columns if self._config.kind == "parquet" else ()
            index = self._index_of(name, f"{self._folder}/{name} {info.size} {info.mtime_ns} {columns}")
            if not index.num_samples:
                raise DataError(f"{self._key}: {name} has no samples; delete the file")
            found.append(index)
            if index.columns.tolist() != found[0].columns.tolist():
                differing = ", ".join(sorted({*index.columns.tolist()} ^ {*found[0].columns.tolist()}))
                raise DataError(
                    f"{self._key}: {name} and {self._names[0]} have different columns: {differing or 'their order'}. "
                    f"Name those to read, which all files have, as {self._key}.columns"
                )
            if time.monotonic() - told_s > _PROGRESS_S:
                told_s = time.monotonic()
                print(f"indexing {self._config.path}: {number + 1} of {len(self._names)} shards", flush=True)
        return found

    def _index_of(self, name: str, identity: str) -> _Index:
        place = _folder_of_indices() / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.npz"
        if place.exists():
            with np.load(place) as stored:
                return _Index(stored["places"], stored["blocks"], int(stored["num_samples"]), stored["columns"])
        try:
            index: _Index = self._repeated(lambda: self._make_index(name))
        except OSError as error:
            raise DataError(f"{self._key}: {name} cannot be read: {self._unreachable(error)}") from error
        place.parent.mkdir(parents=True, exist_ok=True)
        # Several workers of a machine may make the same index at the same time.
        new = place.with_suffix(f".{time.monotonic_ns()}.npz")
        np.savez(new, **index._asdict())
        new.replace(place)
        return index

    def _make_index(self, name: str) -> _Index:
        with self._file(name) as file:
            return self._format.index(file, name)


def _folder_of_indices() -> Path:
    return runs_root() / "indices"


class _Parquet:
    """Rows of Parquet. A block is a row group."""

    def __init__(self, config: ShardsSource, key: str) -> None:
        self._columns = list(config.columns) or None
        self._key = key

    def index(self, file: Any, name: str) -> _Index:
        try:
            metadata = parquet.ParquetFile(file).metadata
        except pa.ArrowException as error:
            raise DataError(f"{self._key}: {name} is no whole Parquet file: {error}") from error
        schema = metadata.schema.to_arrow_schema()
        names = schema.names
        missing = sorted({*(self._columns or ())} - {*names})
        if missing:
            raise DataError(f"{self._key}.columns: {name} has no {', '.join(missing)}; there are: {', '.join(names)}")
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        starts = np.cumsum([0, *rows])
        columns = np.array([f"{name} {schema.field(name).type}" for name in self._columns or names], np.str_)
        return _Index(np.array([metadata.num_rows]), starts[:-1], metadata.num_rows, columns)

    def open(self, file: Any) -> Any:
        return parquet.ParquetFile(file)

    def read(self, opened: Any, index: _Index, first: int, stop: int) -> Any:
        group = int(np.searchsorted(index.blocks, first, side="right")) - 1  # some row groups are empty
        table = opened.read_row_group(group, self._columns, use_threads=False)  # `Shards` has threads
        columns = {name: _values(table.column(name)) for name in table.column_names}
        are_tuples = TUPLES in (table.schema.metadata or {})
        return are_tuples, columns

    def samples(self, block: Any, numbers: list[int]) -> list[Any]:
        are_tuples, columns = block
        rows = zip(*(_of_rows(values, numbers) for values in columns.values()), strict=True)
        return list(rows) if are_tuples else [dict(zip(columns, row, strict=True)) for row in rows]


@dataclass(frozen=True)
class _Lists:
    """Lists of numbers, of one array for all rows."""

    numbers: NDArray[Any]
    ends: Int64s  # where each list begins, and where the last one ends

    def __getitem__(self, row: int, /) -> NDArray[Any]:
        # Arrow's memory is read-only, of which torch warns.
        return self.numbers[self.ends[row] : self.ends[row + 1]].copy()


def _of_rows(values: Any, rows: list[int]) -> Iterable[Any]:
    """Return the values of rows. Nothing that a caller may change is shared."""
    if isinstance(values, Array):
        return [values[row].as_py() for row in rows]
    return values[rows] if isinstance(values, np.ndarray) else [values[row] for row in rows]


def _values(column: ChunkedArray) -> Any:
    """Return a column's values for `_of_rows`."""
    array: Array = column.combine_chunks()
    if isinstance(array, ChunkedArray):  # as pyarrow before 19 returns an empty column
        return array.to_pylist()
    if isinstance(array.type, FixedShapeTensorType):
        return array.to_numpy_ndarray()
    if _is_number(array.type):
        if not array.null_count:
            return array.to_numpy(zero_copy_only=False)
        of_type = array.type.to_pandas_dtype()
        return [None if value is None else of_type(value) for value in array.to_pylist()]
    if array.null_count or not _is_list(array.type):
        return array
    numbers = array.values
    if not _is_number(numbers.type) or numbers.null_count:
        return array
    if types.is_fixed_size_list(array.type):
        return numbers.to_numpy(zero_copy_only=False).reshape(len(array), array.type.list_size)
    ends = array.offsets.to_numpy().astype(np.int64)
    lengths = np.diff(ends)
    if (lengths == lengths[0]).all():
        return numbers.to_numpy(zero_copy_only=False)[ends[0] : ends[-1]].reshape(len(array), lengths[0])
    return _Lists(numbers.to_numpy(zero_copy_only=False), ends)


def _is_number(kind: Any) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _is_list(kind: Any) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


class _JsonLines:
    """Lines of JSON objects."""

    def __init__(self, config: ShardsSource, key: str) -> None:
        self._columns = config.columns
        self._key = key

    def index(self, file: Any, name: str) -> _Index:
        found = [np.zeros(1, np.int64)]
        while chunk := file.read(2**22):
            begin = file.tell() - len(chunk)
            found.append(begin + np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + 1)
        ends = np.concatenate(found)
        if ends[-1] != file.tell():
            ends = np.append(ends, file.tell())  # the last line may lack its end
        # An empty line belongs to the sample before it.
        begins = ends[:-1][np.diff(ends) > 1]
        return _index(np.append(begins, ends[-1]) if len(begins) else begins)

    def open(self, file: Any) -> Any:
        return file

    def read(self, opened: Any, index: _Index, first: int, stop: int) -> list[bytes]:
        return _cut(opened, index, first, stop)

    def samples(self, block: list[bytes], numbers: list[int]) -> list[Any]:
        return [self._sample(block[number]) for number in numbers]

    def _sample(self, line: bytes) -> dict[str, Any]:
        try:
            sample = json.loads(line)
        except ValueError as error:
            raise DataError(f"is no JSON: {error}") from error
        if not isinstance(sample, dict):
            raise DataError(f"is no JSON object: {line[:60]!r}")
        return _chosen(sample, self._columns)


class _WebDataset:
    """Files of a tar. Neighbouring files whose names are equal up to the first dot make a sample."""

    def __init__(self, config: ShardsSource, key: str) -> None:
        self._columns = config.columns
        self._key = key

    def index(self, file: Any, name: str) -> _Index:
        places: list[int] = []
        last = None
        end = 0
        # Each header has 512 bytes, and a bucket would need a request for each.
        buffered = io.BufferedReader(file, _BUFFER_BYTES)
        try:
            with tarfile.open(fileobj=buffered, mode="r:") as tar:
                for member in tar:
                    end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                    if not member.isfile():
                        continue
                    stem, _ = _parts(member.name)
                    if stem != last:
                        places.append(member.offset)
                        last = stem
        except tarfile.TarError as error:
            raise DataError(f"{self._key}: {name} is no whole tar: {error}") from error
        # A tar ends with two blocks of zeros. The package `tarfile` takes a tar that was cut off for a shorter one.
        buffered.seek(min(end, file.size()))
        if buffered.read(2 * tarfile.BLOCKSIZE) != bytes(2 * tarfile.BLOCKSIZE):
            raise DataError(f"{self._key}: {name} is no whole tar: its end is missing")
        return _index(np.array([*places, end] if places else [], np.int64))

    def open(self, file: Any) -> Any:
        return file

    def read(self, opened: Any, index: _Index, first: int, stop: int) -> list[bytes]:
        return _cut(opened, index, first, stop)

    def samples(self, block: list[bytes], numbers: list[int]) -> list[Any]:
        return [self._sample(block[number]) for number in numbers]

    def _sample(self, files: bytes) -> dict[str, Any]:
        sample = {}
        with tarfile.open(fileobj=io.BytesIO(files), mode="r:") as tar:
            for member in tar:
                content = tar.extractfile(member)
                _, kind = _parts(member.name)
                if content is not None and (not self._columns or kind in self._columns):
                    sample[kind] = self._decoded(kind, content.read())
        return _chosen(sample, self._columns)

    def _decoded(self, kind: str, content: bytes) -> Any:
        match kind.rpartition(".")[2]:
            case "json":
                return json.loads(content)
            case "txt":
                return content.decode()
            case "cls" | "id" | "index":
                return int(content)
            case "npy":
                return np.load(io.BytesIO(content))
            case suffix if suffix in _IMAGES:
                images = import_extra("PIL.Image", "vision", f"{self._key}.kind")
                pixels = np.array(images.open(io.BytesIO(content)).convert("RGB"))
                return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()  # uint8 (3, height, width)
        return content


_formats: dict[str, Callable[[ShardsSource, str], _Format]] = {
    "parquet": _Parquet,
    "jsonl": _JsonLines,
    "webdataset": _WebDataset,
}


def _index(places: Int64s) -> _Index:
    """Return the index of adjacent samples; `places` is empty without samples."""
    numbers = np.arange(max(0, len(places) - 1))
    # A block ends after so many samples, or after about so many bytes.
    begins = np.diff(numbers // _BLOCK_SAMPLES) + np.diff(places[:-1] // _BLOCK_BYTES) > 0
    blocks = np.append(0, np.flatnonzero(begins) + 1) if len(numbers) else numbers
    return _Index(places, blocks, len(numbers))


def _cut(file: Any, index: _Index, first: int, stop: int) -> list[bytes]:
    """Return the bytes of each sample from `first` to before `stop`, by one read."""
    places = index.places[first : stop + 1].tolist()
    file.seek(places[0])
    content = file.read(places[-1] - places[0])
    if len(content) != places[-1] - places[0]:
        raise ValueError("the file is shorter than its index")
    return [content[begin - places[0] : end - places[0]] for begin, end in pairwise(places)]


def _parts(name: str) -> tuple[str, str]:
    """Return the name of a sample, folders included, and the name of its part."""
    folder, _, file = name.rpartition("/")
    stem, _, kind = file.partition(".")
    return f"{folder}/{stem}", kind


def _chosen(sample: dict[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    missing = [column for column in columns if column not in sample]
    if missing:
        raise DataError(f"has no {', '.join(missing)}, although `columns` lists it; there are: {', '.join(sample)}")
    return {column: sample[column] for column in columns} if columns else sample
