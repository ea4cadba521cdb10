"""What every drill asserts, whatever was done to the run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from steadfast.analysis.audit import Proof, audit
from steadfast.checkpoint.catalog import Catalog
from steadfast.checkpoint.weights import read_whole
from steadfast.config import Config, parse_config
from steadfast.data import Extent, build_dataset
from steadfast.run.directory import RunDirectory
from steadfast.storage import LocalStore
from tests.support.command import Finished, Running
from tests.support.history import History, read_ledger

if TYPE_CHECKING:
    from tests.support.bed import Bed  # imports Ray, which most drills do not need


def summary_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return found


def check_ledger(directory: Path, num_steps: int) -> History:
    """The run has come to `num_steps`, and each step has the samples that the seed puts there, or was left out."""
    config = parse_config((directory / "config.yaml").read_text())
    assert check_audit(RunDirectory(LocalStore(directory)), config).steps == num_steps
    return read_ledger(LocalStore(directory))


def check_audit(directory: RunDirectory, config: Config) -> Proof:
    """Every step is committed once, with the digest of its samples. Raises CounterExample."""
    return audit(directory, config, Extent.of(build_dataset(config.data)))


def check_replica_waits(running: Running, bed: Bed, after_step: int) -> None:
    """Of two replicas of two workers one loses a node: it waits for another one, and the other replica trains on.

    Nothing is on storage meanwhile, so the state comes from the other replica.
    """
    running.wait_for_event("attempt_started", attempt=1, world_size=4)
    running.wait_for_step(after_step)
    bed.lose(bed.nodes[1])
    running.wait_for_event("attempt_started", attempt=2, world_size=2, source="rank 0")
    assert running.wait_for_event("left_over")["workers"] == 1
    assert not list(running.directory.glob("checkpoints/*"))
    bed.add()
    running.wait_for_event("attempt_started", attempt=3, world_size=4)
    check_stopped(running)
    assert [event["lost_steps"] for event in running.events if event["event"] == "restore"] == [0, 0]


def check_stopped(running: Running, lost_steps: int = 0) -> None:
    """Ends a run by Ctrl-C: each of its steps is committed, and at most `lost_steps` were done twice."""
    running.interrupt()
    stopped = running.wait()
    assert stopped.code == 3, stopped.output
    summary = summary_of(running.directory)
    assert check_ledger(running.directory, summary["step"]).num_lost == summary["lost_steps"] <= lost_steps


def check_finished(running: Running, timeout_s: float = 120) -> Finished:
    """Wait until a command ends, as it must, with a finished run. Return what it said."""
    finished = running.wait(timeout_s)
    assert finished.code == 0, finished.output
    return finished


def check_identical(one: Path, other: Path) -> None:
    ours, theirs = summary_of(one), summary_of(other)
    for part in ("model_sha256", "optimizer_sha256"):
        assert ours[part] == theirs[part], f"{part} of {one.name} and {other.name}"


def weights_of(directory: Path) -> dict[str, Tensor]:
    """Whole, from the run's last checkpoint."""
    return read_whole(Catalog(LocalStore(directory)), summary_of(directory)["step"])


def differences(one: Path, other: Path) -> list[Tensor]:
    """Of the weights of two runs, tensor by tensor."""
    ours, theirs = weights_of(one), weights_of(other)
    return [ours[name] - theirs[name] for name in ours]


def distance(one: Path, other: Path) -> float:
    """Euclidean, of all weights."""
    return math.sqrt(sum(float(each.double().square().sum()) for each in differences(one, other)))
