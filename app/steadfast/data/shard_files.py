"""Samples in shards: Parquet files, JSON lines, and tars as WebDataset writes them.

An index says where the samples of each shard lie, so samples can be read in any order. The index is made once, and kept
where runs are stored. Samples are read in blocks: row groups of Parquet, or a few neighbouring samples.
"""

import hashlib
import io
import json
import tarfile
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pyarrow import Array, ChunkedArray, FixedShapeTensorType, fs, parquet, types

from steadfast.backoff import delays
from steadfast.config import ShardsSource
from steadfast.data.extras import import_extra
from steadfast.data.order import WINDOW_BLOCKS
from steadfast.errors import DataError
from steadfast.run.directory import place_of_data, runs_root
from steadfast.storage import arrow_filesystem, open_store

Int64s = NDArray[np.int64]

_SUFFIXES = {"parquet": (".parquet",), "jsonl": (".jsonl", ".ndjson"), "webdataset": (".tar",)}
# Largest block, where the files have no blocks of their own.
_BLOCK_SAMPLES = 256
_BLOCK_BYTES = 2**22
_REPETITIONS = 6
_OPEN_FILES = 64  # a process may have about a thousand files open
_PROGRESS_S = 5.0
_IMAGES = ("jpg", "jpeg", "png", "webp")
TUPLES = b"steadfast.tuples"  # metadata of a Parquet file whose samples are tuples


class _Index(NamedTuple):
    """Where the samples of one shard lie.

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


class _Format(Protocol):
    """Format of a file."""

    def index(self, file: Any, name: str) -> _Index:
        """Return the index of an open file. Raises DataError if the file is damaged."""
        ...

    def open(self, file: Any) -> Any:
        """Return a file for `read`."""
        ...

    def read(self, opened: Any, index: _Index, first: int, stop: int) -> Any:
        """Return a block of samples."""
        ...

    def sample(self, block: Any, number: int, name: str) -> Any:
        """Return a sample of a block. Raises DataError if the sample is damaged."""
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
        # In other orders the next sample is rarely of the same block. Of Parquet only row groups can be read.
        self._reads_blocks = getattr(config, "order", "blocks") in ("blocks", "sequential") or config.kind == "parquet"
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._blocks: OrderedDict[int, Any] = OrderedDict()
        self._indices = self._read_indices()
        counts = [index.num_samples for index in self._indices]
        self._starts = np.cumsum([0, *counts])
        shifted = [start + index.blocks for start, index in zip(self._starts, self._indices, strict=False)]
        self.blocks: Int64s = np.concatenate(shifted)
        listed = [f"{name} {size} {count}" for name, size, count in zip(self._names, self._sizes, counts, strict=True)]
        self.digest = hashlib.sha256("\n".join(listed).encode()).hexdigest()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int, /) -> Any:
        [sample] = self.__getitems__([index])
        return sample

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several samples. A DataLoader calls this method too."""
        shards = np.searchsorted(self._starts, indices, side="right") - 1
        blocks = np.searchsorted(self.blocks, indices, side="right") - 1
        return list(map(self._sample, indices, shards.tolist(), blocks.tolist()))

    def _sample(self, index: int, shard: int, block: int) -> Any:
        first = int(self.blocks[block])
        what = f"sample {index - int(self._starts[shard])} of {self._names[shard]}"
        try:
            if self._reads_blocks:
                return self._format.sample(self._block(shard, block), index - first, what)
            return self._format.sample(self._read(shard, index, index + 1), 0, what)
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                f"{self._key}: {what} cannot be read ({error}); the file may have changed since its index was made: "
                f"delete {_folder_of_indices()} and give the command again"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        # Loader processes open the files again.
        return {**self.__dict__, "_open": OrderedDict(), "_blocks": OrderedDict()}

    def _block(self, shard: int, block: int) -> Any:
        if block not in self._blocks:
            stop = self.blocks[block + 1] if block + 1 < len(self.blocks) else len(self)
            self._blocks[block] = self._read(shard, int(self.blocks[block]), int(stop))
            # The samples of so many blocks are shuffled together. Fewer blocks would be read again and again.
            if len(self._blocks) > WINDOW_BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(block)
        return self._blocks[block]

    def _read(self, shard: int, first: int, stop: int) -> Any:
        """Read the samples from the one with index `first` to before `stop`.

        A read from a bucket is repeated for some seconds, because a network fails now and then.
        """
        for delay_s in islice(delays(0.2, 5.0, jitter=0.5), _REPETITIONS):
            try:
                return self._read_once(shard, first, stop)
            except FileNotFoundError:
                raise
            except OSError:
                if self._is_local:
                    raise
                self._open.pop(shard, None)
                time.sleep(delay_s)
        return self._read_once(shard, first, stop)

    def _read_once(self, shard: int, first: int, stop: int) -> Any:
        if shard not in self._open:
            self._open[shard] = self._format.open(self._file(self._names[shard]))
            if len(self._open) > _OPEN_FILES:
                self._open.popitem(last=False)  # closed with its last reference
        self._open.move_to_end(shard)
        start = int(self._starts[shard])
        return self._format.read(self._open[shard], self._indices[shard], first - start, stop - start)

    def _file(self, name: str) -> Any:
        return self._files.open_input_file(f"{self._folder}/{name}")

    def _read_indices(self) -> list[_Index]:
        infos = self._files.get_file_info([f"{self._folder}/{name}" for name in self._names])
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
        with self._file(name) as file:
            index = self._format.index(file, name)
        place.parent.mkdir(parents=True, exist_ok=True)
        # Several workers of a machine may make the same index at the same time.
        new = place.with_suffix(f".{time.monotonic_ns()}.npz")
        np.savez(new, **index._asdict())
        new.replace(place)
        return index


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
        except Exception as error:
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
        table = opened.read_row_group(group, columns=self._columns)
        columns = {name: _values(table.column(name)) for name in table.column_names}
        are_tuples = TUPLES in (table.schema.metadata or {})
        return are_tuples, columns

    def sample(self, block: Any, number: int, name: str) -> Any:
        are_tuples, columns = block
        values = {column: of_rows[number] for column, of_rows in columns.items()}
        return tuple(values.values()) if are_tuples else values


class _Lists(NamedTuple):
    """Lists of numbers, of one array for all rows."""

    numbers: NDArray[Any]
    ends: Int64s  # where each list begins, and where the last one ends

    def __getitem__(self, row: Any, /) -> Any:
        # Arrow's memory is read-only, of which torch warns.
        return self.numbers[self.ends[row] : self.ends[row + 1]].copy()


class _Arrays(NamedTuple):
    """Arrays of one shape, (rows, ...)."""

    numbers: NDArray[Any]

    def __getitem__(self, row: Any, /) -> Any:
        return self.numbers[row].copy()


def _values(column: ChunkedArray) -> Any:
    """Return a column's values by row: numbers of numpy, arrays, or Python's objects."""
    array: Array = column.combine_chunks()
    if isinstance(array, ChunkedArray):  # as pyarrow before 19 returns an empty column
        return array.to_pylist()
    if isinstance(array.type, FixedShapeTensorType):
        return _Arrays(array.to_numpy_ndarray())
    if _is_number(array.type):
        if not array.null_count:
            return array.to_numpy(zero_copy_only=False)
        of_type = array.type.to_pandas_dtype()
        return [None if value is None else of_type(value) for value in array.to_pylist()]
    if array.null_count or not _is_list(array.type):
        return array.to_pylist()
    numbers = array.values
    if not _is_number(numbers.type) or numbers.null_count:
        return array.to_pylist()
    if types.is_fixed_size_list(array.type):
        return _Arrays(numbers.to_numpy(zero_copy_only=False).reshape(len(array), -1))
    return _Lists(numbers.to_numpy(zero_copy_only=False), array.offsets.to_numpy().astype(np.int64))


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

    def sample(self, block: list[bytes], number: int, name: str) -> dict[str, Any]:
        line = block[number]
        try:
            sample = json.loads(line)
        except ValueError as error:
            raise DataError(f"{self._key}: {name} is no JSON: {error}") from error
        if not isinstance(sample, dict):
            raise DataError(f"{self._key}: {name} is no JSON object: {line[:60]!r}")
        return _chosen(sample, self._columns, f"{self._key}.columns: {name}")


class _WebDataset:
    """Files of a tar. Neighbouring files whose names are equal up to the first dot make a sample."""

    def __init__(self, config: ShardsSource, key: str) -> None:
        self._columns = config.columns
        self._key = key

    def index(self, file: Any, name: str) -> _Index:
        places: list[int] = []
        last = None
        end = 0
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
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
        file.seek(min(end, file.size()))
        if file.read(2 * tarfile.BLOCKSIZE) != bytes(2 * tarfile.BLOCKSIZE):
            raise DataError(f"{self._key}: {name} is no whole tar: its end is missing")
        return _index(np.array([*places, end] if places else [], np.int64))

    def open(self, file: Any) -> Any:
        return file

    def read(self, opened: Any, index: _Index, first: int, stop: int) -> list[bytes]:
        return _cut(opened, index, first, stop)

    def sample(self, block: list[bytes], number: int, name: str) -> dict[str, Any]:
        sample = {}
        with tarfile.open(fileobj=io.BytesIO(block[number]), mode="r:") as tar:
            for member in tar:
                content = tar.extractfile(member)
                _, kind = _parts(member.name)
                if content is not None and (not self._columns or kind in self._columns):
                    sample[kind] = self._decoded(kind, content.read())
        return _chosen(sample, self._columns, f"{self._key}.columns: {name}")

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
                images = import_extra("PIL.Image", "vision", self._key)
                pixels = np.array(images.open(io.BytesIO(content)).convert("RGB"))
                return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()  # uint8 (3, height, width)
        return content


_formats: dict[str, Callable[[ShardsSource, str], _Format]] = {
    "parquet": _Parquet,
    "jsonl": _JsonLines,
    "webdataset": _WebDataset,
}


def _index(places: Int64s) -> _Index:
    """Return the index of samples that follow each other; `places` is empty without samples."""
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
        raise OSError("the file is shorter than its index")
    return [content[begin - places[0] : end - places[0]] for begin, end in pairwise(places)]


def _parts(name: str) -> tuple[str, str]:
    """Return the name of a sample, folders included, and the name of its part."""
    folder, _, file = name.rpartition("/")
    stem, _, kind = file.partition(".")
    return f"{folder}/{stem}", kind


def _chosen(sample: dict[str, Any], columns: Sequence[str], what: str) -> dict[str, Any]:
    missing = [column for column in columns if column not in sample]
    if missing:
        raise DataError(f"{what} has no {', '.join(missing)}; there are: {', '.join(sample)}")
    return {column: sample[column] for column in columns} if columns else sample
