"""Shards with known samples."""

import io
import itertools
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

NUM_SAMPLES = 700  # in two shards, more than a block in the first
FIRST = 600
KINDS = ["parquet", "jsonl", "webdataset"]


def values(number: int) -> dict[str, Any]:
    return {"label": number, "tokens": [number, number + 1], "text": f"sample {number}"}


def write_shards(folder: Path, kind: str, starts: tuple[int, ...] = (0, FIRST, NUM_SAMPLES)) -> None:
    folder.mkdir(exist_ok=True)
    for shard, (start, stop) in enumerate(itertools.pairwise(starts)):
        samples = [values(number) for number in range(start, stop)]
        match kind:
            case "parquet":
                table = pa.Table.from_pylist(samples)
                parquet.write_table(table, folder / f"{shard}.parquet", row_group_size=100)
            case "jsonl":
                (folder / f"{shard}.jsonl").write_text("".join(f"{json.dumps(sample)}\n" for sample in samples))
            case "webdataset":
                write_tar(folder / f"{shard}.tar", samples)


def write_tar(path: Path, samples: list[dict[str, Any]]) -> None:
    with tarfile.open(path, "w") as tar:
        for sample in samples:
            tokens = io.BytesIO()
            np.save(tokens, np.array(sample["tokens"]))
            add(tar, f"{sample['label']:06d}.cls", str(sample["label"]).encode())
            add(tar, f"{sample['label']:06d}.tokens.npy", tokens.getvalue())
            add(tar, f"{sample['label']:06d}.txt", sample["text"].encode())


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
