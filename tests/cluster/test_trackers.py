"""What TensorBoard and Weights & Biases show of a run that is killed, resumed and resized."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.checks import check_finished
from tests.support.command import STANDALONE, TORCHRUN, Commands
from tests.support.curves import check_curve, kill_rank

WORDS = ["logging.every_steps=1", "checkpoint.every=1000 steps"]
SLOW = "faults.inject=[{kind: slow_at, ranks: [0, 1], ms: 30}]"
NUM_STEPS = 150
FIGURES = {"train/loss": "loss", "train/grad_norm": "grad_norm", "train/lr": "lr"}


def curves(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the points of each tag, as TensorBoard's own reader has them."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(directory / "tensorboard"), size_guidance={reader.SCALARS: 0})
    events.Reload()
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_a_run_that_is_killed_and_restarted_has_one_curve_a_tag_of_tensorboard(command: Commands) -> None:
    run = command(launcher=[*STANDALONE, "--max-restarts", "1"])
    running = run.start(*WORDS, SLOW, f"run.steps={NUM_STEPS}")
    running.wait_for_step(70)
    kill_rank(running, 0)
    check_finished(running)

    found = curves(run.directory)
    assert FIGURES.keys() | {"speed/step_ms"} < found.keys()
    for tag, points in found.items():
        steps = [step for step, _ in points]
        assert steps == sorted(set(steps)), f"{tag}: {steps}"
    for tag, figure in FIGURES.items():
        check_curve(run.directory, dict(found[tag]), NUM_STEPS, figure)
    assert [value for _, value in found["events/failures"]] == [0.0, 1.0]


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_a_run_that_is_killed_resumed_and_resized_is_one_run_of_wandb(
    command: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    words = [*WORDS, "trackers=[{kind: wandb, project: drills}]"]
    killed = command(launcher=[*STANDALONE, "--max-restarts", "1"])
    running = killed.start(*words, SLOW, "run.steps=300")
    # W&B takes seconds to open a run, and keeps what comes meanwhile in memory.
    running.wait_until(lambda: any(run.history for run in offline_runs(killed.directory)), "figures there")
    running.wait_for_step(running.history.last_step + 30)
    kill_rank(running, 0)
    check_finished(running, 200)
    resized = command(launcher=[*TORCHRUN, "--standalone", "--nproc-per-node", "1"])
    check_finished(resized.start(*words, "run.steps=310", "scaling.num_workers=1"))

    runs = offline_runs(killed.directory)
    known = json.loads((killed.directory / "wandb" / "run.json").read_text())
    assert [run.id for run in runs] == 3 * [known["id"]]
    assert [run.has_ended for run in runs] == [False, True, True]
    assert {run.project for run in runs} == {"drills"}
    told = [row for run in runs for row in run.history if "events/failures" in row]
    assert [(row["events/failures"], row["events/restarts"]) for row in told] == [(0, 0), (1, 0), (1, 1)]
    assert runs[0].config["batch"]["global_size"] == 48

    drawn = {row["_step"]: row["train/loss"] for run in runs for row in run.history if "train/loss" in row}
    check_curve(killed.directory, drawn, 310)


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
