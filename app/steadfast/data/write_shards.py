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

from steadfast.data.shard_files import TUPLES
from steadfast.errors import DataError, StorageError

_GROUP_ROWS = 1000
_GROUP_BYTES = 2**22
_GROUPS_PER_SHARD = 64
_PROGRESS_S = 5.0
_FIRST = b"steadfast.first"  # metadata of a shard: sha256 of its first sample


def write_shards(stream: Iterable[Any], folder: Path) -> int:
    """Write all samples of a stream, and return their number.

    Shards that are already in the folder are kept, and their samples skipped.

    Raises:
        DataError: a sample cannot be stored, or the stream begins with other samples than the shards.
        StorageError: the folder cannot be written.
    """
    samples = iter(stream)
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    done = _skip_written(samples, folder)
    shards = len(list(folder.glob("*.parquet")))
    for shard in itertools.count(shards):
        count = _write_shard(samples, folder / f"{shard:06d}.parquet", done)
        if not count:
            break
        done += count
    if not done:
        shutil.rmtree(folder)
        raise DataError("the stream has no samples")
    return done


def _skip_written(samples: Iterator[Any], folder: Path) -> int:
    """Skip the samples of shards that were written before. Return their number."""
    done = 0
    for path in sorted(folder.glob("*.parquet")):
        found = parquet.read_metadata(path)
        first = next(samples, None)
        # A shuffle without a seed would write some samples twice and others never.
        if first is None or _digest(first) != found.metadata[_FIRST]:
            raise DataError(
                f"sample {done} of the stream is another one than when {path} was written. Delete {folder}, and let "
                "the stream give the same samples in the same order each time"
            )
        for _ in itertools.islice(samples, found.num_rows - 1):
            pass
        done += found.num_rows
        print(f"{path.name} is already written: {done:,} samples", flush=True)
    return done


def _write_shard(samples: Iterator[Any], path: Path, done: int) -> int:
    """Write one shard, and return its number of samples, 0 at the end of the stream."""
    temporary = path.with_suffix(".unfinished")
    writer = None
    count = 0
    began_s = told_s = time.monotonic()
    try:
        for group in itertools.islice(_groups(samples), _GROUPS_PER_SHARD):
            table = _table(group)
            with _writing(path):
                if writer is None:
                    metadata = {_FIRST: _digest(group[0])}
                    if isinstance(group[0], tuple):
                        metadata[TUPLES] = b""
                    writer = parquet.ParquetWriter(temporary, table.schema.with_metadata(metadata))
                writer.write_table(_like(table, writer.schema))
            count += table.num_rows
            if time.monotonic() - told_s > _PROGRESS_S:
                told_s = time.monotonic()
                rate = count / (told_s - began_s)
                print(f"{path.name}: {done + count:,} samples, {rate:,.0f} in a second", flush=True)
    finally:
        if writer is not None:
            writer.close()
    if count:
        with _writing(path):
            temporary.rename(path)
    return count


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn errors of the file system into StorageError; errors of the stream stay as they are."""
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
    """Return the values of a sample by name; those of a tuple by number."""
    if isinstance(sample, Mapping):
        return sample
    if isinstance(sample, tuple):
        return {str(place): value for place, value in enumerate(sample)}
    raise DataError(f"the stream gives a {type(sample).__name__}; index takes mappings and tuples of values")


def _table(samples: Sequence[Any]) -> pa.Table:
    rows = list(map(_named, samples))
    columns = {}
    for name in rows[0]:
        try:
            columns[name] = _column([row[name] for row in rows])
        except (pa.ArrowException, TypeError, ValueError, KeyError) as error:
            raise _unfit(name, error) from error
    return pa.table(columns)


def _column(values: Sequence[Any]) -> Any:
    plain = [value.numpy() if isinstance(value, torch.Tensor) else value for value in values]
    if all(isinstance(value, np.ndarray | np.generic) for value in plain):
        if plain[0].ndim == 0:
            return pa.array(np.stack(plain))
        if plain[0].ndim > 1:
            return pa.FixedShapeTensorArray.from_numpy_ndarray(np.stack(plain))
    return pa.array(plain)


def _like(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return a table with the types of the shard's first row group."""
    try:
        return table.cast(schema)
    except (pa.ArrowException, ValueError) as error:
        raise _unfit(", ".join(table.column_names), error) from error


def _unfit(name: str, error: Exception) -> DataError:
    return DataError(
        f"{name} of a sample cannot be stored: {error}. All samples have the same names, with numbers, text, bytes, "
        "and arrays or tensors of one type; an array of several dimensions has the same shape in all samples"
    )


def _digest(sample: Any) -> bytes:
    table = _table([sample])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return hashlib.sha256(sink.getvalue()).hexdigest().encode()
