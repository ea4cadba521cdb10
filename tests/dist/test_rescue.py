"""An exception in the user's code ends the run: what had been done by then is on storage, if it is worth that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from steadfast.checkpoint.catalog import Catalog
from steadfast.config import Config
from steadfast.data import build_order
from steadfast.parallel.precision import Precision
from steadfast.run.directory import RunDirectory
from steadfast.storage import LocalStore
from tests.support.claims import check_run, check_weights
from tests.support.drill import drill
from tests.support.events import event_lines
from tests.support.gang import MemberFailed
from tests.support.reference import reference
from tests.support.small import small

BUG = "faults.inject=[{kind: fail_at, step: 9, rank: 1}]"


def test_the_last_step_before_the_bug_is_saved_and_resumed_from(tmp_path: Path) -> None:
    config = small(tmp_path, BUG)
    with pytest.raises(MemberFailed, match="InjectedFault"):
        drill(config, worlds=[2])
    assert Catalog(RunDirectory.of(config).store).steps() == [8]
    resumed = drill(config, worlds=[3])
    assert resumed.told("restore", "step") == [8]
    assert resumed.told("restore", "lost_steps") == [0]
    check_run_but_for_losses(resumed, config)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exit", r"UserExit: sys\.exit in your own code \(no more\)"),
        ("interrupt", r"UserExit: KeyboardInterrupt in your own code"),
        ("base", r"UserExit: Base in your own code \(no more\)"),
        ("unprintable", r"UserExit: Unprintable in your own code \(.* ZeroDivisionError in __str__\)"),
    ],
)
def test_what_would_end_the_process_is_an_exception_like_any_other(tmp_path: Path, how: str, said: str) -> None:
    quits = f'task={{target: "tests.dist.quitting:Quits", args: {{how: {how}, forward: 24}}}}'  # its first in step 9
    with pytest.raises(MemberFailed, match=said) as failure:
        drill(small(tmp_path, quits), worlds=[2])
    assert "tests/dist/quitting.py" in str(failure.value)  # with its traceback
    config = small(tmp_path)
    assert Catalog(RunDirectory.of(config).store).steps() == [8]


def check_run_but_for_losses(run: Any, config: Any) -> None:
    """The word of the last steps died with the worker: the ledger has them as planned, without a loss."""
    unconfirmed = [line["step"] for line in run.history.lines if not line.get("confirmed", True)]
    assert set(unconfirmed) <= {7, 8}
    expected = reference(config)
    for line in run.history.lines:
        if line["loss"] is None:
            line["loss"] = expected.losses[line["step"] - 1]
    check_run(run, expected)


def refuse_to_overwrite() -> None:
    honest = LocalStore.write

    def write(store: LocalStore, name: str, parts: Any) -> None:
        assert not (store.path / name).exists() or not name.endswith(".safetensors"), f"{name} is written twice"
        honest(store, name, parts)

    LocalStore.write = write  # type: ignore[assignment]


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1, 2]])
def test_a_checkpoint_of_that_step_stays_whole_and_so_does_one_of_each_other_rank(
    tmp_path: Path, ranks: list[int]
) -> None:
    bugs = ", ".join(f"{{kind: fail_at, step: 9, rank: {rank}}}" for rank in ranks)
    config = small(tmp_path, f"faults.inject=[{bugs}]", "checkpoint.every=8 steps", "checkpoint.keep_last=1")
    with pytest.raises(MemberFailed, match="InjectedFault") as failure:
        drill(config, worlds=[3], patch=refuse_to_overwrite)
    assert "written twice" not in str(failure.value)
    catalog = Catalog(RunDirectory.of(config).store)
    manifest = catalog.manifest(8)
    assert manifest is not None
    catalog.verify(manifest)
    assert (catalog.steps(), catalog.quarantined()) == ([8], {})


def break_updates() -> None:
    honest = Precision.update

    def update(self: Precision, optimizer: Any, grad_norm: Tensor) -> bool:
        if any(state["step"] >= 8 for state in optimizer.state.values()):
            raise ZeroDivisionError
        return honest(self, optimizer, grad_norm)

    Precision.update = update


@pytest.mark.parametrize(
    ("overrides", "patch", "why"),
    [
        ([], break_updates, "the exception came while the weights were being updated"),
    ],
)
def test_what_is_not_whole_is_not_saved_and_the_run_says_so(
    tmp_path: Path, overrides: list[str], patch: Any, why: str
) -> None:
    config = small(tmp_path, *overrides)
    with pytest.raises(MemberFailed):
        drill(config, worlds=[2], patch=patch)
    directory = RunDirectory.of(config)
    assert Catalog(directory.store).steps() == []
    assert why in {event["error"] for event in event_lines(directory) if event["event"] == "not_saved"}


FSDP, HSDP = "parallel={kind: fsdp}", "parallel={kind: fsdp, shard_size: 2}"
STAGES = "parallel={kind: pipeline, stages: 2}"
UNREADABLE = 3 * 13 + 5  # place in the order of the samples: in step 4, within the first epoch
LAST_WHOLE = {"data": 3, "forward": 8, "backward": 8, "validation": 9}


def raising(phase: str, config: Config, num_forwards: int) -> list[str]:
    """The overrides by which one rank raises behind step `LAST_WHOLE`; it runs so many forwards a step."""
    match phase:
        case "data":
            [index] = build_order(config.data, 61, config.run.seed).train(np.array([UNREADABLE])).tolist()
            return [f'data={{target: "tests.dist.quitting:Unreadable", args: {{index: {index}}}}}']
        case "forward":
            return ["faults.inject=[{kind: fail_at, step: 9, rank: 1}]"]
        case "backward":
            return [
                f'task={{target: "tests.dist.quitting:Raises", args: {{phase: {phase}, forward: {8 * num_forwards}}}}}'
            ]
        case "validation":
            return [
                f'task={{target: "tests.dist.quitting:Raises", args: {{phase: {phase}, forward: 0}}}}',
                "validation.every=9 steps",
                "data.validation_fraction=0.1",
            ]
    raise AssertionError(phase)


@pytest.mark.parametrize("phase", LAST_WHOLE)
@pytest.mark.parametrize(("sharding", "size", "num_forwards"), [(FSDP, 2, 4), (HSDP, 4, 2), (STAGES, 2, 7)])
def test_shards_of_the_last_step_are_saved_wherever_the_exception_comes(
    tmp_path: Path, phase: str, sharding: str, size: int, num_forwards: int
) -> None:
    config = small(tmp_path, sharding)
    with pytest.raises(MemberFailed, match=r"Bug|InjectedFault"):
        drill(small(tmp_path, sharding, *raising(phase, config, num_forwards)), worlds=[size])
    directory = RunDirectory.of(config)
    assert [event for event in event_lines(directory) if event["event"] == "not_saved"] == []
    assert Catalog(directory.store).newest() == LAST_WHOLE[phase]


HOOK = 'hooks=[{target: "tests.dist.quitting:RaisingHook", args: {step: 9}}]'


@pytest.mark.parametrize(
    ("overrides", "patch", "why"),
    [
        ([], break_updates, "the exception came while the weights were being updated"),
        ([HOOK], None, "the parts of other workers are missing"),
    ],
)
def test_if_an_update_was_interrupted_the_copies_in_memory_are_saved(
    tmp_path: Path, overrides: list[str], patch: Any, why: str
) -> None:
    with pytest.raises(MemberFailed):
        drill(small(tmp_path, FSDP, *overrides), worlds=[2], patch=patch)
    config = small(tmp_path)
    directory = RunDirectory.of(config)
    assert why in {event["error"] for event in event_lines(directory) if event["event"] == "not_saved"}
    step = Catalog(directory.store).newest()
    assert step in range(1, 9)
    resumed = drill(config, worlds=[2])
    assert resumed.told("restore", "step") == [step]
    check_weights(resumed, reference(config))


def test_another_number_of_workers_goes_on_with_the_shards_of_an_exception(tmp_path: Path) -> None:
    with pytest.raises(MemberFailed):
        drill(small(tmp_path, FSDP, BUG), worlds=[2])
    resumed = drill(small(tmp_path, FSDP), worlds=[3])
    assert resumed.told("restore", "step") == [8]
    assert resumed.told("restore", "lost_steps") == [0]
    check_run_but_for_losses(resumed, small(tmp_path))
