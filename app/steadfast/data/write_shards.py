"""Write the samples of a stream into shards of Parquet, for `steadfast index`."""

import contextlib
import hashlib
import itertools
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet

from steadfast.data.shard_formats import TUPLES
from steadfast.errors import DataError, StorageError
from steadfast.storage.local import sync_tree

_GROUP_ROWS = 1000
_GROUP_BYTES = 2**22
_GROUPS_PER_SHARD = 64
_PROGRESS_S = 5.0
_DIGEST = b"steadfast.digest"  # metadata of a shard: sha256 of its samples


def write_shards(stream: Iterable[Any], folder: Path) -> int:
    """Write all samples of a stream, and return their number.

    Shards that are already in the folder are kept, and their samples skipped.

    Raises:
        DataError: a sample cannot be stored, or the stream gives other samples than those of the shards.
        StorageError: the folder cannot be written.
    """
    samples = _naming(stream)
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    writer = _Writer()
    kept = True
    for number in itertools.count():
        path = folder / f"{number:06d}.parquet"
        kept = kept and path.exists() and writer.check(path, samples)
        if not (kept or writer.write(path, samples)):
            break
    for path in folder.glob("*.parquet"):
        if int(path.stem) >= number:  # a shard whose predecessors were lost
            path.unlink()
    sync_tree(folder)
    if not writer.count:
        shutil.rmtree(folder)
        raise DataError("the stream has no samples")
    return writer.count


class _Writer:
    """Writes shards that all have the columns of the first one.

    Attributes:
        count: number of samples that are written or checked.
    """

    def __init__(self) -> None:
        self.count = 0
        self._schema: pa.Schema | None = None

    def check(self, path: Path, samples: Iterator[Any]) -> bool:
        """Skip the samples of a shard that was written before, and return whether the shard can be read.

        Raises DataError if the stream's samples differ.
        """
        try:
            found = parquet.ParquetFile(path)
        except (pa.ArrowException, OSError):  # after a loss of power, for example
            return False
        self._schema = self._schema or found.schema_arrow.remove_metadata()
        digest = hashlib.sha256()
        for group in _groups(itertools.islice(samples, found.metadata.num_rows)):
            digest.update(_content(self._table(group)))
        # A shuffle without a seed would write some samples twice and others never.
        if digest.hexdigest().encode() != found.metadata.metadata[_DIGEST]:
            raise DataError(
                f"the samples from number {self.count} on are others than when {path} was written. Delete "
                f"{path.parent}, and let the stream give the same samples in the same order each time"
            )
        self.count += found.metadata.num_rows
        print(f"{path.name} is already written: {self.count:,} samples", flush=True)
        return True

    def write(self, path: Path, samples: Iterator[Any]) -> int:
        """Write one shard, and return its number of samples, 0 at the end of the stream."""
        before = self.count
        temporary = path.with_suffix(".unfinished")
        digest = hashlib.sha256()
        began_s = told_s = time.monotonic()
        with contextlib.ExitStack() as stack:
            file: parquet.ParquetWriter | None = None
            for group in itertools.islice(_groups(samples), _GROUPS_PER_SHARD):
                table = self._table(group)
                digest.update(_content(table))
                with _writing(path):
                    if file is None:
                        mark = {TUPLES: b""} if isinstance(group[0], tuple) else None
                        file = stack.enter_context(parquet.ParquetWriter(temporary, table.schema.with_metadata(mark)))
                    file.write_table(table)
                self.count += table.num_rows
                if time.monotonic() - told_s > _PROGRESS_S:
                    told_s = time.monotonic()
                    rate = (self.count - before) / (told_s - began_s)
                    print(f"{path.name}: {self.count:,} samples, {rate:,.0f} in a second", flush=True)
            if file is None:
                return 0
            file.add_key_value_metadata({_DIGEST: digest.hexdigest()})
            with _writing(path):
                file.close()
                sync_tree(temporary)
                temporary.rename(path)
        return self.count - before

    def _table(self, samples: Sequence[Any]) -> pa.Table:
        """Return samples as a table with the columns of the first shard. Raises DataError."""
        rows = list(map(_named, samples))
        names = self._schema.names if self._schema is not None else list(rows[0])
        for row in rows:
            if list(row) != names:
                raise DataError(f"a sample has the values {', '.join(row)}, and the first one {', '.join(names)}")
        columns = {}
        for name in names:
            try:
                columns[name] = _column([row[name] for row in rows])
                if self._schema is not None:
                    columns[name] = columns[name].cast(self._schema.field(name).type)
                elif columns[name].type == pa.null():
                    raise ValueError(f"it is None in the first {len(rows)} samples")
            except (pa.ArrowException, TypeError, ValueError) as error:
                raise DataError(
                    f"{name} of a sample cannot be stored: {error}. A value is a number, a text, bytes, or an array or "
                    "tensor, of one type in all samples; an array of several dimensions has one shape, and is not of "
                    "bool"
                ) from error
        table = pa.table(columns)
        self._schema = self._schema or table.schema
        return table


def _naming(stream: Iterable[Any]) -> Iterator[Any]:
    """Yield the samples of a stream, and name the sample at which the stream raises an exception."""
    number = -1
    try:
        for number, sample in enumerate(stream):  # noqa: B007
            yield sample
    except Exception as error:
        error.add_note(f"while reading sample {number + 1} of the stream")
        raise


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn errors of the file system into StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error}; the same command goes on from there") from error


def _groups(samples: Iterator[Any]) -> Iterator[list[Any]]:
    """Yield the samples of each row group."""
    group: list[Any] = []
    size = 0
    for sample in samples:
        group.append(sample)
        size += sum(getattr(value, "nbytes", None) or sys.getsizeof(value) for value in _named(sample).values())
        if len(group) == _GROUP_ROWS or size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _named(sample: Any) -> Mapping[str, Any]:
    """Return the values of a sample by name. The names of a tuple's values are numbers."""
    if isinstance(sample, Mapping):
        return sample
    if isinstance(sample, tuple):
        return {str(place): value for place, value in enumerate(sample)}
    raise DataError(f"the stream gives a {type(sample).__name__}; index takes mappings and tuples of values")


def _column(values: Sequence[Any]) -> Any:
    plain = [value.numpy() if isinstance(value, torch.Tensor) else value for value in values]
    if all(isinstance(value, np.ndarray | np.generic) for value in plain):
        if plain[0].ndim == 0:
            return pa.array(np.stack(plain))
        if plain[0].ndim > 1:
            stacked = np.stack(plain)
            if stacked.dtype == np.bool_:
                raise TypeError("an array of bool has several dimensions; make it uint8")
            return pa.FixedShapeTensorArray.from_numpy_ndarray(stacked)
    return pa.array(plain)


def _content(table: pa.Table) -> bytes:
    """Return bytes that are equal for equal samples."""
    # The schema is left out, because Parquet changes names in it.
    [batch] = table.combine_chunks().to_batches()
    return bytes(batch.serialize())
