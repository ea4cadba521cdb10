"""Faults and exceptions in the user's code end the run: what was done is on storage, and the next run goes on."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from steadfast.checkpoint.catalog import Catalog
from steadfast.config import Config, ProfileConfig
from steadfast.data import build_order
from steadfast.hooks.hook import Hook, HookContext
from steadfast.parallel.precision import Precision
from steadfast.run.directory import RunDirectory
from steadfast.storage import LocalStore
from steadfast.tasks import LanguageModeling, Sums
from steadfast.telemetry.memory_history import record_memory_history, write_memory_history
from steadfast.world.runtime import World
from tests.support.claims import check_checkpoint, check_ledger, check_losses, check_run, check_weights
from tests.support.drill import drill
from tests.support.events import event_lines
from tests.support.gang import MemberFailed
from tests.support.history import read_ledger
from tests.support.reference import reference
from tests.support.small import Tokens, small

HERE = "tests.dist.test_rescue"


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


class Base(BaseException): ...


class Quits(LanguageModeling):
    """Rank 1 ends in its training forward number `forward`, from 0."""

    def __init__(self, how: str, forward: int) -> None:
        self._how = how
        self._left = forward

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums:
        if model.training and dist.get_rank() == 1:
            if self._left == 0:
                self.quit()
            self._left -= 1
        return super().loss(model, batch)

    def quit(self) -> None:
        match self._how:
            case "exit":
                sys.exit("no more")
            case "interrupt":
                raise KeyboardInterrupt
            case "base":
                raise Base("no more")
            case "unprintable":
                raise Unprintable


class Bug(Exception):
    pass


def _raise(*_: object) -> None:
    raise Bug


class Raises(LanguageModeling):
    """The last rank raises in the backward of its training forward number `forward`, from 0, or in its validation."""

    def __init__(self, phase: str, forward: int) -> None:
        self._phase = phase
        self._left = forward

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums:
        sums = super().loss(model, batch)
        if dist.get_rank() != dist.get_world_size() - 1:
            return sums
        if model.training:
            if self._left == 0 and self._phase == "backward":
                sums.loss_sum.register_hook(_raise)
            self._left -= 1
        elif self._phase == "validation" and self._left < 0:  # not before the first step, where tasks are tried
            raise Bug
        return sums


class RaisingHook(Hook):
    """The last rank raises behind the update of a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, run: HookContext) -> None:
        if run.step == self._step and run.rank == run.world_size - 1:
            raise Bug


class Unreadable(Tokens):
    """One sample cannot be read."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self._index = index

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        if index == self._index:
            raise Bug
        return super().__getitem__(index)


BUG = "faults.inject=[{kind: fail_at, step: 9, rank: 1}]"


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_last_step_before_the_bug_is_saved_and_resumed_from(tmp_path: Path, kind: str) -> None:
    config = small(tmp_path, f"parallel.kind={kind}", BUG)
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
    quits = f"task={{target: '{HERE}:Quits', args: {{how: {how}, forward: 24}}}}"  # its first in step 9
    with pytest.raises(MemberFailed, match=said) as failure:
        # Of a loss that draws no random numbers the check before the first step takes few forwards.
        drill(small(tmp_path, quits, "model.dropout=0"), worlds=[2])
    assert "tests/dist/test_rescue.py" in str(failure.value)  # with its traceback
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
def test_a_checkpoint_of_that_step_stays_whole_and_so_does_that_of_each_rank(tmp_path: Path, ranks: list[int]) -> None:
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


def not_saved(directory: RunDirectory) -> list[str]:
    """Return why the run did not save what it held."""
    return [event["error"] for event in event_lines(directory) if event["event"] == "not_saved"]


INTERRUPTED = "the exception came while the weights were being updated"


def test_what_is_not_whole_is_not_saved_and_the_run_says_so(tmp_path: Path) -> None:
    config = small(tmp_path)
    with pytest.raises(MemberFailed):
        drill(config, worlds=[2], patch=break_updates)
    directory = RunDirectory.of(config)
    assert Catalog(directory.store).steps() == []
    assert INTERRUPTED in not_saved(directory)


FSDP, HSDP = "parallel={kind: fsdp}", "parallel={kind: fsdp, shard_size: 2}"
STAGES = "parallel={kind: pipeline, stages: 2}"
UNREADABLE = 3 * 13 + 5  # place in the order of the samples: in step 4, within the first epoch
LAST_WHOLE = {"data": 3, "forward": 8, "backward": 8, "validation": 9}


def raises(phase: str, forward: int) -> str:
    return f"task={{target: '{HERE}:Raises', args: {{phase: {phase}, forward: {forward}}}}}"


def raising(phase: str, config: Config, num_forwards: int) -> list[str]:
    """The overrides by which one rank raises behind step `LAST_WHOLE`; it runs so many forwards a step."""
    match phase:
        case "data":
            [index] = build_order(config.data, 61, config.run.seed).train(np.array([UNREADABLE])).tolist()
            return [f"data={{target: '{HERE}:Unreadable', args: {{index: {index}}}}}"]
        case "forward":
            return [BUG]
        case "backward":
            return [raises(phase, 8 * num_forwards)]
        case "validation":
            return [raises(phase, 0), "validation.every=9 steps", "data.validation_fraction=0.1"]
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
    assert not_saved(directory) == []
    assert Catalog(directory.store).newest() == LAST_WHOLE[phase]


HOOK = f"hooks=[{{target: '{HERE}:RaisingHook', args: {{step: 9}}}}]"


@pytest.mark.parametrize(
    ("overrides", "patch", "why"),
    [([], break_updates, INTERRUPTED), ([HOOK], None, "the parts of other workers are missing")],
)
def test_if_an_update_was_interrupted_copies_serve(tmp_path: Path, overrides: list[str], patch: Any, why: str) -> None:
    with pytest.raises(MemberFailed):
        drill(small(tmp_path, FSDP, *overrides), worlds=[2], patch=patch)
    config = small(tmp_path)
    directory = RunDirectory.of(config)
    assert why in not_saved(directory)
    step = Catalog(directory.store).newest()
    assert step in range(1, 9)
    resumed = drill(config, worlds=[2])
    assert resumed.told("restore", "step") == [step]
    check_weights(resumed, reference(config))


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("{kind: fail_at, step: 7, rank: 1}", "InjectedFault: injected at step 7"),
        ("{kind: kill_at, step: 7, rank: 1}", "process 1: gone"),
        ("{kind: kill_at, step: 4, rank: 1, phase: checkpoint}", "process 1: gone"),
        ("{kind: nan_at, step: 7, rank: 1}", "step 7: loss nan, gradient norm nan: not finite"),
    ],
)
def test_a_fault_strikes_once_and_the_run_that_is_resumed_is_right(tmp_path: Path, fault: str, seen: str) -> None:
    config = small(tmp_path, f"faults.inject=[{fault}]", "checkpoint.every=3 steps", "recovery.max_skipped_steps=0")
    with pytest.raises(MemberFailed, match=seen):
        drill(config, worlds=[2])
    assert read_ledger(LocalStore(tmp_path / "small")).last_step <= 7
    resumed, expected = drill(config, worlds=[2]), reference(config)
    check_weights(resumed, expected)
    check_checkpoint(resumed)
    assert sorted(resumed.history.committed) == list(range(1, 15))


def test_a_worker_that_is_out_of_memory_tells_of_its_allocations_first(tmp_path: Path) -> None:
    config = small(tmp_path, "faults.inject=[{kind: oom_at, step: 7, rank: 1}]", "profile.memory_history=1000")
    drill(config, worlds=[2, 2], patch=as_on_a_gpu)
    written = tmp_path / "small" / "profile" / "memory-attempt-1-rank-1.pickle"
    assert written.read_text() == "[1000] allocations"
    told = [event for event in event_lines(RunDirectory.of(config)) if event["event"] == "memory_history"]
    assert [(event["attempt"], event["rank"], event["path"]) for event in told] == [(1, 1, str(written))]


def as_on_a_gpu() -> None:
    """Have the history of memory asked for and written as if the device were a GPU."""
    cuda = torch.device("cuda")
    asked: list[int] = []

    def write(config: ProfileConfig, directory: RunDirectory, world: World, _: torch.device, error: Any) -> Any:
        return write_memory_history(config, directory, world, cuda, error)

    patch = pytest.MonkeyPatch()  # of a process that ends with the drill
    patch.setattr("torch.cuda.memory._record_memory_history", lambda max_entries, stacks: asked.append(max_entries))
    patch.setattr("torch.cuda.memory._dump_snapshot", lambda path: Path(path).write_text(f"{asked} allocations"))
    patch.setattr("steadfast.worker.record_memory_history", lambda config, _: record_memory_history(config, cuda))
    patch.setattr("steadfast.worker.write_memory_history", write)


def test_a_worker_that_drains_ends_the_attempt_and_nothing_is_done_twice(tmp_path: Path) -> None:
    config = small(tmp_path, "faults.inject=[{kind: drain_at, step: 5, rank: 2}]")
    run, expected = drill(config, worlds=[3, 2]), reference(config)
    for check in (check_ledger, check_weights, check_losses, check_checkpoint):
        check(run, expected)
    assert run.told("attempt_ended", "cause") == ["resized", "finished"]
    assert run.told("fault_injected", "kind") == ["drain_at"]
    assert {line["world_size"] for line in run.history.lines} == {3, 2}
