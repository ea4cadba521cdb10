"""A loss of power leaves a run, and what `index` writes, in a state from which the same command goes on."""

import contextlib
import io
import os
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet
from torch.utils.data import TensorDataset

from steadfast import fit
from steadfast.cli import main
from steadfast.config import parse_config
from steadfast.data import write_shards
from steadfast.run.directory import EVENTS, METRICS, STEPS
from steadfast.storage import LocalStore
from steadfast.storage.jsonl import read_lines
from tests.support.gang import Gang, Member, MemberFailed
from tests.support.history import read_ledger
from tests.support.killing import newest_whole
from tests.support.power import MODELS, Recording, record

HERE = "tests.dist.test_power"
STATES = int(os.environ.get("POWER_STATES", "12"))  # of all of hundreds
NAN = 12  # the sample because of which a step is left out

RUN = f"""
run:        {{name: r, report: false}}
batch:      {{global_size: 13, microbatch_size: 4}}
model:      {{kind: mlp, in_features: 4, hidden: [3], out_features: 2}}
task:       {{kind: classification}}
data:       {{target: "{HERE}:Samples"}}
schedule:   {{kind: constant}}
precision:  {{kind: fp64}}
checkpoint: {{every: 2 steps, keep_last: 2}}
trackers:   []
faults:     {{inject: [{{kind: oom_at, step: 7}}]}}
"""


class Samples(TensorDataset):
    """61 samples, so that the last of five steps is short. One of them is not a number."""

    def __init__(self) -> None:
        values = torch.randn(61, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        labels = (values[:, 0] > 0).long()
        values[NAN, 0] = torch.nan
        super().__init__(values, labels)


def train(storage: Path, epochs: int) -> None:
    config = parse_config(RUN, "power.yaml", [f"run.storage={storage}", f"run.epochs={epochs}"])
    assert fit(config).summary["status"] == "finished"


def stream() -> Iterator[dict[str, Any]]:
    for number in range(330):
        yield {"number": number, "values": np.full(8, number, np.float32)}


def index(folder: Path) -> int:
    """Write the stream into seven shards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_shards, "_GROUP_ROWS", 25)
        patch.setattr(write_shards, "_GROUPS_PER_SHARD", 2)
        return main(
            0.0, ["index", "--config", "ddp.yaml", "--out", str(folder / "x"), f"data={{target: '{HERE}:stream'}}"]
        )


def rows(folder: Path) -> dict[str, Any]:
    return {path.name: parquet.read_table(path) for path in (folder / "x").iterdir()}


def apart(act: Callable[[], object]) -> tuple[object, str]:
    """Return what an act returns in a process of its own, and its output. Raises MemberFailed."""
    with Gang(1) as gang:
        answer: tuple[object, str] = gang.run(partial(_captured, act))[0]
    return answer


def _captured(act: Callable[[], object], _: Member) -> tuple[object, str]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        return act(), output.getvalue()


def states(recording: Recording, seed: int) -> Iterator[tuple[int, str]]:
    """Yield the numbers of operations after which the power fails, and what the file system leaves then."""
    for model in MODELS:  # after the end of the command
        yield len(recording.operations), model
    drawn = random.Random(seed)
    for _ in range(STATES - len(MODELS)):
        yield drawn.randint(1, len(recording.operations)), drawn.choice(MODELS)


def check_resumes(storage: Path, begun: int, expected: dict[int, dict[str, Any]]) -> None:
    """The command goes on from the newest whole checkpoint to the result of the undisturbed run, and `audit` tells."""
    store = LocalStore(storage / "r")
    newest = whole = newest_whole(storage / "r/checkpoints")
    num_events = len(list(read_lines(store, EVENTS)))
    for epochs in range(begun, 3):
        _, output = apart(partial(train, storage, epochs))
        new = list(read_lines(store, EVENTS))[num_events:]
        begins = [event["step"] for event in new if event["event"] in ("attempt_started", "finished")]
        assert (begins or [newest])[0] >= newest, output
        newest = 0
    ledger = read_ledger(store).committed
    assert [ledger[step]["samples_digest"] for step in ledger] == [line["samples_digest"] for line in expected.values()]
    for step, line in ledger.items():
        if line["loss"] is None:  # left out, or made from the plan because the line was lost
            assert line["num_samples"] == 0 or step > whole
        else:
            assert line["loss"] == pytest.approx(expected[step]["loss"], rel=1e-12)
    code, output = apart(partial(main, 0.0, ["audit", str(storage / "r"), "--trust-code"]))
    assert code == 0, output


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recording, Path]:
    """A run with two steps left out, a short one, and forwards that shrank; in two calls, of one epoch and of two."""
    folder, scratch = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("scratch")
    return record([sys.executable, "-m", HERE, str(folder)], folder, scratch), folder


@pytest.mark.timeout(60 + 10 * STATES)
def test_the_same_command_goes_on_after_a_loss_of_power(recorded: tuple[Recording, Path], tmp_path: Path) -> None:
    recording, whole = recorded
    expected = read_ledger(LocalStore(whole / "r")).committed
    called = [operation.path for operation in recording.operations].index(str(whole / "1"))
    failed = []
    for count, model in states(recording, seed=49):
        recording.rebuild(count, model, tmp_path / "left")
        if count == len(recording.operations):
            for name in (STEPS, METRICS):
                assert (tmp_path / "left/r" / name).read_bytes() == (whole / "r" / name).read_bytes()
        try:
            check_resumes(tmp_path / "left", 1 if count <= called else 2, expected)
        except (AssertionError, MemberFailed) as error:
            failed.append(f"{model} after {count}, {recording.operations[count - 1][:2]}: {str(error)[-2000:]}")
    assert not failed, f"{len(failed)} of {STATES}:\n" + "\n".join(failed)


@pytest.mark.timeout(60 + 10 * STATES)
def test_index_goes_on_after_a_loss_of_power(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    folder, scratch = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("scratch")
    recording = record([sys.executable, "-m", HERE, str(folder), "index"], folder, scratch)
    failed = []
    for count, model in states(recording, seed=50):
        recording.rebuild(count, model, tmp_path / "left")
        is_whole = (tmp_path / "left/x").exists()  # then the same command is refused
        code, output = apart(partial(index, tmp_path / "left"))
        if (code, rows(tmp_path / "left")) != (2 if is_whole else 0, rows(folder)):
            failed.append(f"{model} after {count}, {recording.operations[count - 1][:2]}: {output[-2000:]}")
    assert not failed, f"{len(failed)} of {STATES}:\n" + "\n".join(failed)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    if sys.argv[2:]:
        raise SystemExit(index(place))
    for epochs in (1, 2):
        train(place, epochs)
        (place / f"{epochs}").touch()
