"""Read what Weights & Biases has written offline: its messages, in the framing of LevelDB's logs."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_HEADER_BYTES = 7  # of the file
_BLOCK_BYTES = 32768
_FRAME = struct.Struct("<IHB")  # checksum, length, and which part of a message it is
_WHOLE, _LAST = 1, 4


class OfflineRun(NamedTuple):
    """What one process has written. history: the figures of a row, by tag, in the order of rows."""

    id: str
    project: str
    config: dict[str, Any]
    history: list[dict[str, Any]]
    has_ended: bool


def offline_runs(directory: Path) -> list[OfflineRun]:
    """Return what lies in the folder `wandb` of a run directory, oldest first; also what there is of one under way."""
    found = [_read(path) for path in sorted(directory.glob("wandb/wandb/offline-run-*/run-*.wandb"))]
    return [run for run in found if run is not None]


def _read(path: Path) -> OfflineRun | None:
    run: Any = None
    history: list[dict[str, Any]] = []
    has_ended = False
    for record in _records(path.read_bytes()):
        match record.WhichOneof("record_type"):
            case "run":
                run = record.run
            case "history":
                items = record.history.item
                history.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
            case "exit":
                has_ended = True
    if run is None:
        return None
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    return OfflineRun(run.run_id, run.project, config, history, has_ended)


def _records(data: bytes) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    position = _HEADER_BYTES
    message = b""
    while position + _FRAME.size <= len(data):
        left = _BLOCK_BYTES - position % _BLOCK_BYTES
        if left < _FRAME.size:  # too few for another frame: the block is filled up
            position += left
            continue
        _, num_bytes, part = _FRAME.unpack_from(data, position)
        position += _FRAME.size
        if position + num_bytes > len(data):  # it is being written
            return
        message += data[position : position + num_bytes]
        position += num_bytes
        if part in (_WHOLE, _LAST):
            yield wandb_internal_pb2.Record.FromString(message)
            message = b""
