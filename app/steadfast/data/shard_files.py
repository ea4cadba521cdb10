"""Samples in shards: Parquet files, JSON lines, and tars as WebDataset writes them.

An index says where the samples of each shard lie, so each sample can be read alone, in any order. Parquet has the index
in its files. Of other files the index is made in one pass, and kept where runs are stored.
"""

import hashlib
import io
import json
import tarfile
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pyarrow import fs, parquet

from steadfast.config import ShardsSource
from steadfast.data.extras import import_extra
from steadfast.data.order import WINDOW_BLOCKS
from steadfast.errors import DataError
from steadfast.run.directory import place_of_data, runs_root
from steadfast.storage import arrow_filesystem, open_store

Int64s = NDArray[np.int64]

_SUFFIXES = {"parquet": (".parquet",), "jsonl": (".jsonl", ".ndjson"), "webdataset": (".tar",)}
_BLOCK_SAMPLES = 256  # samples of a block, where the files have no blocks of their own
_PROGRESS_S = 5.0
_IMAGES = ("jpg", "jpeg", "png", "webp")


class _Index(NamedTuple):
    """Where the samples of one shard lie.

    Attributes:
        places: where each sample begins, and where the last one ends; of Parquet only the number of samples.
        blocks: number of the first sample of each block.
        num_samples: number of samples.
    """

    places: Int64s
    blocks: Int64s
    num_samples: int


class _Format(Protocol):
    """Format of a file."""

    def index(self, file: Any, name: str) -> _Index:
        """Return the index of an open file. Raises DataError if the file is damaged."""
        ...

    def read(self, file: Any, name: str, index: _Index, number: int) -> dict[str, Any]:
        """Return a sample of an open file."""
        ...


class Shards:
    """Map-style dataset of the samples of all shards in a folder, in the order of their names.

    A sample is a mapping of names to values.

    Args:
        config: the section.
        key: of the section, for messages.

    Attributes:
        blocks: id of the first sample of each block.
        digest: identifies the names, sizes and lengths of the shards.

    Raises:
        DataError: there are no shards, or one is damaged or empty.
    """

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
        self._files = files or fs.LocalFileSystem()
        self._open: dict[int, Any] = {}
        self._indices = self._read_indices()
        counts = [index.num_samples for index in self._indices]
        self._starts = np.cumsum([0, *counts])
        shifted = [start + index.blocks for start, index in zip(self._starts, self._indices, strict=False)]
        self.blocks: Int64s = np.concatenate(shifted)
        listed = [f"{name} {size} {count}" for name, size, count in zip(self._names, self._sizes, counts, strict=True)]
        self.digest = hashlib.sha256("\n".join(listed).encode()).hexdigest()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        number = int(index - self._starts[shard])
        name = self._names[shard]
        if shard not in self._open:
            self._open[shard] = self._file(name)
        try:
            return self._format.read(self._open[shard], name, self._indices[shard], number)
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                f"{self._key}: sample {number} of {name} cannot be read ({error}); the file may have changed since its "
                f"index was made: delete {_folder_of_indices()} and give the command again"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        # Loader processes open the files again.
        return {**self.__dict__, "_open": {}, "_format": _formats[self._config.kind](self._config, self._key)}

    def _file(self, name: str) -> Any:
        return self._files.open_input_file(f"{self._folder}/{name}")

    def _read_indices(self) -> list[_Index]:
        infos = self._files.get_file_info([f"{self._folder}/{name}" for name in self._names])
        self._sizes = [info.size for info in infos]
        told_s = time.monotonic()
        found = []
        for number, (name, info) in enumerate(zip(self._names, infos, strict=True)):
            index = self._index_of(name, f"{self._folder}/{name} {info.size} {info.mtime_ns}")
            if not index.num_samples:
                raise DataError(f"{self._key}: {name} has no samples; delete the file")
            found.append(index)
            if time.monotonic() - told_s > _PROGRESS_S:
                told_s = time.monotonic()
                print(f"indexing {self._config.path}: {number + 1} of {len(self._names)} shards", flush=True)
        return found

    def _index_of(self, name: str, identity: str) -> _Index:
        place = _folder_of_indices() / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.npz"
        if self._config.kind != "parquet" and place.exists():
            with np.load(place) as stored:
                return _Index(stored["places"], stored["blocks"], int(stored["num_samples"]))
        with self._file(name) as file:
            index = self._format.index(file, name)
        if self._config.kind != "parquet":
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
        self._opened: dict[str, Any] = {}
        self._kept: OrderedDict[tuple[str, int], dict[str, list[Any]]] = OrderedDict()

    def index(self, file: Any, name: str) -> _Index:
        try:
            metadata = parquet.ParquetFile(file).metadata
        except Exception as error:
            raise DataError(f"{self._key}: {name} is no whole Parquet file: {error}") from error
        names = metadata.schema.to_arrow_schema().names
        missing = sorted({*(self._columns or ())} - {*names})
        if missing:
            raise DataError(f"{self._key}.columns: {name} has no {', '.join(missing)}; there are: {', '.join(names)}")
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        starts = np.cumsum([0, *rows])
        return _Index(np.array([metadata.num_rows]), starts[:-1], metadata.num_rows)

    def read(self, file: Any, name: str, index: _Index, number: int) -> dict[str, Any]:
        group = int(np.searchsorted(index.blocks, number, side="right")) - 1
        row = number - int(index.blocks[group])
        return {column: values[row] for column, values in self._group(file, name, group).items()}

    def _group(self, file: Any, name: str, group: int) -> dict[str, list[Any]]:
        if (name, group) not in self._kept:
            if name not in self._opened:
                self._opened[name] = parquet.ParquetFile(file)
            table = self._opened[name].read_row_group(group, columns=self._columns)
            self._kept[name, group] = table.to_pydict()
            # The samples of so many blocks are shuffled together. Fewer blocks would be read again and again.
            if len(self._kept) > WINDOW_BLOCKS:
                self._kept.popitem(last=False)
        self._kept.move_to_end((name, group))
        return self._kept[name, group]


class _JsonLines:
    """Lines of JSON objects."""

    def __init__(self, config: ShardsSource, key: str) -> None:
        self._columns = config.columns
        self._key = key

    def index(self, file: Any, name: str) -> _Index:
        places = [0]
        while chunk := file.read(2**22):
            begin = file.tell() - len(chunk)
            ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + 1
            places += (begin + ends).tolist()
        if places[-1] != file.tell():
            places.append(file.tell())  # the last line may lack its end
        # An empty line belongs to the sample before it.
        begins = [begin for begin, end in pairwise(places) if end > begin + 1]
        return _index([*begins, places[-1]] if begins else [])

    def read(self, file: Any, name: str, index: _Index, number: int) -> dict[str, Any]:
        begin, end = index.places[number : number + 2].tolist()
        file.seek(begin)
        line = file.read(end - begin)
        try:
            sample = json.loads(line)
        except ValueError as error:
            raise DataError(f"{self._key}: sample {number} of {name} is no JSON: {error}") from error
        if not isinstance(sample, dict):
            raise DataError(f"{self._key}: sample {number} of {name} is no JSON object: {line[:60]!r}")
        return _chosen(sample, self._columns, f"{self._key}.columns: sample {number} of {name}")


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
        return _index([*places, end])

    def read(self, file: Any, name: str, index: _Index, number: int) -> dict[str, Any]:
        begin, end = index.places[number : number + 2].tolist()
        file.seek(begin)
        sample = {}
        with tarfile.open(fileobj=io.BytesIO(file.read(end - begin)), mode="r:") as tar:
            for member in tar:
                content = tar.extractfile(member)
                _, kind = _parts(member.name)
                if content is not None and (not self._columns or kind in self._columns):
                    sample[kind] = self._decoded(kind, content.read())
        return _chosen(sample, self._columns, f"{self._key}.columns: sample {number} of {name}")

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


def _index(places: Sequence[int]) -> _Index:
    num_samples = max(0, len(places) - 1)
    assert all(begin < end for begin, end in pairwise(places))
    return _Index(np.array(places, np.int64), np.arange(0, num_samples, _BLOCK_SAMPLES), num_samples)


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
