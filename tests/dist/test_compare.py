"""`compare` on runs that were trained: one that was disturbed at a known step parts from the other there."""

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from steadfast.analysis.compare import compare
from steadfast.hooks.hook import HookContext
from steadfast.run.directory import RunDirectory
from tests.support import drill as drills
from tests.support.drill import Drilled
from tests.support.patches import wait_for_storage
from tests.support.run_directories import write_as_a_command
from tests.support.small import small

ROOT = Path(__file__).parents[2]
EVERY_4 = "logging.weights_digest_every=4 steps"
EVERY_STEP = "logging.weights_digest_every=1 steps"
DISTURB = "hooks=[{target: 'tests.dist.test_compare:Disturb', args: {step: 6}}]"
# Left out at step 6, with a checkpoint before it to go back to.
SPIKE = ["faults.inject=[{kind: nan_at, step: 6, rank: 1}]", "checkpoint.every=2 steps"]
drill = partial(drills.drill, patch=wait_for_storage)


class Disturb:
    """Moves one weight a little after one step, on all ranks alike, as a fault in memory would."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, run: HookContext) -> None:
        if run.step == self._step:
            with torch.no_grad():
                next(run.model.parameters()).view(-1)[0] += 1e-3


def run(storage: Path, name: str, worlds: Sequence[int], *overrides: str, leave_after: Sequence[int] = ()) -> Drilled:
    config = small(storage, f"run.name={name}", *overrides)
    found = drill(config, worlds=worlds, leave_after=leave_after)
    write_as_a_command(config)
    return found


def directory(storage: Path, name: str) -> RunDirectory:
    return RunDirectory.at(str(storage / name))


def digests(run: Drilled) -> dict[int, str]:
    return {step: line["weights"] for step, line in run.history.committed.items() if "weights" in line}


def command(storage: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Give the literal command, and return its exit code and what it prints."""
    runs = [str(storage / name) for name in words[:2]]
    line = [sys.executable, "main.py", "compare", *runs, "--json", *words[2:]]
    answer = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not answer.stderr
    found: dict[str, Any] = json.loads(answer.stdout)
    return answer.returncode, found


def test_a_digest_is_that_of_the_weights_behind_its_step(tmp_path: Path) -> None:
    """The same in a run that stops there: its state is what the digest says, whenever the line was written."""
    whole = run(tmp_path, "whole", [2], EVERY_4)
    assert list(digests(whole)) == [4, 8, 12]
    short = drill(small(tmp_path, "run.name=short", EVERY_STEP), worlds=[2], stop_after=7)
    assert short.summary["step"] == 8  # agreed on one step later
    assert list(digests(short)) == list(range(1, 9))
    assert len(set(digests(short).values())) == 8
    assert digests(short)[8] == digests(whole)[8] == short.summary["model_sha256"][:32]
    found = compare(directory(tmp_path, "whole"), directory(tmp_path, "short"))
    assert (found.first, found.last_steps, found.weights, found.weights_same) == (None, (14, 8), 2, 8)


def test_a_run_that_was_interrupted_at_one_size_is_the_same(tmp_path: Path) -> None:
    run(tmp_path, "one", [2], EVERY_4)
    run(tmp_path, "other", [2, 2], EVERY_4, leave_after=[6])
    code, found = command(tmp_path, "one", "other")
    assert (code, found["same"]) == (0, True)
    assert (found["steps"], found["losses"], found["weights"], found["weights_same"]) == (14, 14, 3, 12)
    assert {both[0] == both[1] for both in found["ends"].values()} == {True}
    assert {"model_sha256", "optimizer_sha256"} <= found["ends"].keys()


def test_a_weight_that_was_changed_shows_in_the_next_loss_and_the_next_digest(tmp_path: Path) -> None:
    run(tmp_path, "one", [2], EVERY_4)
    run(tmp_path, "other", [2], EVERY_4, DISTURB)
    code, found = command(tmp_path, "one", "other")
    assert (code, found["same"]) == (1, False)
    assert found["first"]["step"] == 7  # the first to be computed with the weight
    assert list(found["first"]["values"]) == ["loss"]
    assert (found["weights_same"], found["weights_differ"]) == (4, 8)
    nodes = {socket.gethostname(): [0, 1]}
    assert found["first"]["ran"] == [{"attempt": 1, "world_size": 2, "shares": [4, 3], "nodes": nodes}] * 2
    assert found["shared_otherwise"] is None
    assert [change["key"] for change in found["changes"]] == ["hooks"]


def test_a_step_that_was_left_out_is_the_difference(tmp_path: Path) -> None:
    run(tmp_path, "one", [2], EVERY_STEP)
    run(tmp_path, "other", [2, 2], EVERY_STEP, *SPIKE)
    found = compare(directory(tmp_path, "one"), directory(tmp_path, "other"))
    assert found.first is not None
    assert (found.first.step, found.first.values["skipped"]) == (6, (False, True))
    ours, theirs = found.first.ran
    assert ours is not None
    assert theirs is not None
    assert (ours.attempt, theirs.attempt) == (1, 2)
    assert (found.weights_same, found.weights_differ) == (5, 6)  # that of a step left out is the one before


def test_other_workers_give_other_sums_and_the_losses_of_fp64_tell_no_more(tmp_path: Path) -> None:
    run(tmp_path, "one", [2])
    run(tmp_path, "other", [2, 3], leave_after=[4])
    found = compare(directory(tmp_path, "one"), directory(tmp_path, "other"))
    assert found.shared_otherwise == 6
    assert found.weights == 0
    assert 0 < found.largest_rounding < 1e-9
    assert found.rounded_since is not None
    assert found.rounded_since >= 6
    assert found.first is not None  # not by a loss: the weights that they end with have other bits
    assert found.first.values.keys() == {"model_sha256", "optimizer_sha256"}


@pytest.mark.parametrize("reducer", ["steadfast", "torch"])
def test_all_strategies_with_whole_weights_name_them_alike(tmp_path: Path, reducer: str) -> None:
    whole = run(tmp_path, "one", [1], EVERY_4, f"parallel.reducer={reducer}", "run.steps=4")
    assert digests(whole)[4] == whole.summary["model_sha256"][:32]
