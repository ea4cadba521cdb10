"""Formats of shards: Parquet, JSON lines, and the tars of WebDataset."""

import io
import json
import tarfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pyarrow import Array, ChunkedArray, FixedShapeTensorType, parquet, types

from steadfast.config import ShardsSource
from steadfast.data.batches import Rows
from steadfast.data.extras import import_extra
from steadfast.data.order import Int64s
from steadfast.errors import DataError

# Largest block, where the files have no blocks of their own.
_BLOCK_SAMPLES = 256
_BLOCK_BYTES = 2**22
_LONGEST_LINE = 2**28  # bytes of a JSON line
_BUFFER_BYTES = 2**20  # of a tar while its index is made
_IMAGES = ("jpg", "jpeg", "png", "webp")
TUPLES = b"steadfast.tuples"  # metadata of a Parquet file whose samples are tuples


class ShardIndex(NamedTuple):
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


class Format(Protocol):
    """Format of a file.

    Attributes:
        suffixes: of the names of such files.
        has_row_groups: whether only whole row groups can be read.
    """

    @property
    def suffixes(self) -> tuple[str, ...]: ...

    @property
    def has_row_groups(self) -> bool: ...

    def index(self, file: Any, name: str) -> ShardIndex:
        """Return the index of an open file. Raises DataError if the file is damaged."""
        ...

    def open(self, file: Any) -> Any:
        """Return a file for `read`."""
        ...

    def read(self, opened: Any, index: ShardIndex, first: int, stop: int) -> Any:
        """Return the content of a block of samples."""
        ...

    def samples(self, block: Any, numbers: list[int]) -> Sequence[Any]:
        """Return samples of a block, in the order of `numbers`.

        Raises DataError, whose message continues the name of the sample.
        """
        ...


class _Parquet:
    """Rows of Parquet. A block is a row group."""

    suffixes = (".parquet",)
    has_row_groups = True

    def __init__(self, config: ShardsSource, key: str) -> None:
        self._columns = list(config.columns) or None
        self._key = key

    def index(self, file: Any, name: str) -> ShardIndex:
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
        if twice := sorted(name for name in {*(self._columns or names)} if names.count(name) > 1):
            raise DataError(f"{self._key}: {name} has several columns with the name {twice[0]}. Rename them")
        columns = np.array([f"{name} {schema.field(name).type}" for name in self._columns or names], np.str_)
        return ShardIndex(np.array([metadata.num_rows]), starts[:-1], metadata.num_rows, columns)

    def open(self, file: Any) -> Any:
        return parquet.ParquetFile(file)

    def read(self, opened: Any, index: ShardIndex, first: int, stop: int) -> Any:
        group = int(np.searchsorted(index.blocks, first, side="right")) - 1  # some row groups are empty
        table = opened.read_row_group(group, self._columns, use_threads=False)  # `Shards` has threads
        columns = {name: _values(table.column(name)) for name in table.column_names}
        are_tuples = TUPLES in (table.schema.metadata or {})
        return are_tuples, columns

    def samples(self, block: Any, numbers: list[int]) -> Sequence[Any]:
        are_tuples, columns = block
        found = {name: _of_rows(values, numbers) for name, values in columns.items()}
        arrays = {name: values for name, values in found.items() if isinstance(values, np.ndarray)}
        if len(arrays) == len(found):
            return Rows(arrays, are_tuples)
        rows = zip(*found.values(), strict=True)
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


class _AdjacentSamples:
    """Format whose samples are adjacent bytes of a file."""

    has_row_groups = False

    def __init__(self, config: ShardsSource, key: str) -> None:
        self._columns = config.columns
        self._key = key

    def open(self, file: Any) -> Any:
        return file

    def read(self, opened: Any, index: ShardIndex, first: int, stop: int) -> list[bytes]:
        return _cut(opened, index, first, stop)

    def samples(self, block: list[bytes], numbers: list[int]) -> list[Any]:
        return [self._sample(block[number]) for number in numbers]

    def _sample(self, content: bytes) -> dict[str, Any]:
        raise NotImplementedError


class _JsonLines(_AdjacentSamples):
    """Lines of JSON objects."""

    suffixes = (".jsonl", ".ndjson")

    def index(self, file: Any, name: str) -> ShardIndex:
        found, of_windows = [np.zeros(1, np.int64)], [np.zeros(0, np.bool_)]
        last = b""
        while chunk := file.read(2**22):
            begin = file.tell() - len(chunk)
            # Each chunk is read with the byte before it, which may be the carriage return of a line of Windows.
            characters = np.frombuffer((last or b" ") + chunk, np.uint8)
            at = np.flatnonzero(characters[1:] == ord("\n"))
            found.append(begin + at + 1)
            of_windows.append(characters[at] == ord("\r"))
            last = chunk[-1:]
        ends, windows = np.concatenate(found), np.concatenate(of_windows)
        if ends[-1] != file.tell():
            ends, windows = np.append(ends, file.tell()), np.append(windows, False)  # the last line may lack its end
        lengths = np.diff(ends)
        if len(lengths) and lengths.max() > _LONGEST_LINE:
            line = int(lengths.argmax())
            raise DataError(
                f"{self._key}: line {line + 1} of {name} has {lengths[line]} bytes, more than a sample may have "
                f"({_LONGEST_LINE}). The file has a hole, or is of another format"
            )
        # An empty line belongs to the sample before it.
        begins = ends[:-1][lengths - windows > 1]
        return _index(np.append(begins, ends[-1]) if len(begins) else begins)

    def _sample(self, content: bytes) -> dict[str, Any]:
        try:
            sample = json.loads(content)
        except ValueError as error:
            raise DataError(f"is no JSON: {error}") from error
        if not isinstance(sample, dict):
            raise DataError(f"is no JSON object: {content[:60]!r}")
        return _chosen(sample, self._columns)


class _WebDataset(_AdjacentSamples):
    """Files of a tar. Neighbouring files whose names are equal up to the first dot make a sample."""

    suffixes = (".tar",)

    def index(self, file: Any, name: str) -> ShardIndex:
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

    def _sample(self, content: bytes) -> dict[str, Any]:
        sample = {}
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            for member in tar:
                file = tar.extractfile(member)
                _, kind = _parts(member.name)
                if file is not None and (not self._columns or kind in self._columns):
                    sample[kind] = self._decoded(kind, file.read())
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


FORMATS: dict[str, Callable[[ShardsSource, str], Format]] = {
    "parquet": _Parquet,
    "jsonl": _JsonLines,
    "webdataset": _WebDataset,
}


def _index(places: Int64s) -> ShardIndex:
    """Return the index of adjacent samples; `places` is empty without samples."""
    numbers = np.arange(max(0, len(places) - 1))
    # A block ends after so many samples, or after about so many bytes.
    begins = np.diff(numbers // _BLOCK_SAMPLES) + np.diff(places[:-1] // _BLOCK_BYTES) > 0
    blocks = np.append(0, np.flatnonzero(begins) + 1) if len(numbers) else numbers
    return ShardIndex(places, blocks, len(numbers))


def _cut(file: Any, index: ShardIndex, first: int, stop: int) -> list[bytes]:
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
