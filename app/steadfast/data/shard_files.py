"""Samples in shards: files of many samples each.

An index holds the position of each sample, so samples can be read in any order. The index is made once, and kept where
runs are stored. Samples are read in blocks: row groups of Parquet, or a few neighbouring samples. A process that takes
few samples of each block reads them alone.
"""

import hashlib
import io
import time
import zipfile
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from pyarrow import fs

from steadfast.backoff import delays
from steadfast.config import ShardsSource
from steadfast.data.batches import in_order
from steadfast.data.order import WINDOW_BLOCKS, Int64s
from steadfast.data.shard_formats import FORMATS, ShardIndex
from steadfast.errors import ConfigError, DataError
from steadfast.run.directory import place_of_data, runs_root
from steadfast.storage import LocalStore, arrow_filesystem, open_store

_REQUEST_BYTES = 2**18  # a request takes about as long as reading so many bytes
_REPETITIONS = 6  # attempts after the first one
_THREADS = 4  # that read at the same time
_OPEN_FILES = 64  # a process may have about a thousand files open
_PROGRESS_S = 5.0


class _Piece(NamedTuple):
    """Samples that are read together, of one shard."""

    shard: int
    first: int
    stop: int


class Shards:
    """Map-style dataset of the samples of all shards in a folder, in the order of their names.

    A sample is a mapping of names to values, or a tuple if `steadfast index` has written tuples.

    Args:
        config: the section.
        key: of the section, for messages.
        keeps_indices: whether new indices are stored.

    Attributes:
        is_augmented: as in `Dataset`.
        blocks: id of the first sample of each block.
        digest: identifies the names, sizes and lengths of the shards.

    Raises:
        DataError: there are no shards, or one is damaged or empty.
    """

    is_augmented = False

    def __init__(self, config: ShardsSource, key: str, keeps_indices: bool = True) -> None:
        self._keeps_indices = keeps_indices
        self._config = config
        self._key = key
        self._format = FORMATS[config.kind](config, key)
        store = open_store(place_of_data(config.path))
        self._names = [name for name in store.list("") if name.endswith(self._format.suffixes)]
        if not self._names:
            suffixes = " or ".join(f"*{suffix}" for suffix in self._format.suffixes)
            raise DataError(f"{key}.path: {config.path} is no folder with {suffixes}")
        files, self._folder = arrow_filesystem(store)
        self._is_local = files is None
        self._files = files or fs.LocalFileSystem()
        self._can_read_alone = not self._format.has_row_groups
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

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """Return several samples. A DataLoader calls this method too."""
        wanted: dict[_Piece, list[int]] = {}  # for each piece, positions in `indices`
        for position, piece in enumerate(self._pieces(indices)):
            wanted.setdefault(piece, []).append(position)
        # Blocks in memory come first, because reading other blocks may drop them.
        pieces = sorted(wanted, key=lambda piece: (piece not in self._blocks, piece))
        parts: list[Sequence[Any]] = []
        positions: list[list[int]] = []
        # A few pieces at a time, because memory holds the blocks of the window besides.
        for first in range(0, len(pieces), _THREADS):
            found = self._read(pieces[first : first + _THREADS])
            if self._reads_blocks:
                self._keep({piece: (content, len(wanted[piece])) for piece, content in found.items()})
            for piece, content in found.items():
                parts.append(self._decoded(piece, content, [indices[position] for position in wanted[piece]]))
                positions.append(wanted[piece])
        return in_order(parts, positions)

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

    def _decoded(self, piece: _Piece, content: Any, indices: list[int]) -> Sequence[Any]:
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

    def _read_indices(self) -> list[ShardIndex]:
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
            if info.type not in (fs.FileType.File, fs.FileType.NotFound):
                raise DataError(f"{self._key}: {name} is no file")
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

    def _index_of(self, name: str, identity: str) -> ShardIndex:
        indices = LocalStore(_folder_of_indices())
        place = f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.npz"
        # An index that cannot be read is made anew: a full disk or a loss of power may have spoiled the file.
        with suppress(OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile), np.load(indices.path / place) as it:
            return ShardIndex(it["places"], it["blocks"], int(it["num_samples"]), it["columns"])
        try:
            index: ShardIndex = self._repeated(lambda: self._make_index(name))
        except OSError as error:
            raise DataError(f"{self._key}: {name} cannot be read: {self._unreachable(error)}") from error
        if self._keeps_indices:
            content = io.BytesIO()
            np.savez(content, **index._asdict())
            indices.commit(place, content.getvalue())
        return index

    def _make_index(self, name: str) -> ShardIndex:
        with self._file(name) as file:
            return self._format.index(file, name)


def _folder_of_indices() -> Path:
    return runs_root() / "indices"
