"""Weights from a file: read once, by a run that has nothing newer."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from steadfast.config import Config
from steadfast.loop.worker_state import WorkerState
from steadfast.models import build_model
from steadfast.models.gpt import Gpt
from tests.support.claims import check_equal, check_identical
from tests.support.drill import drill
from tests.support.gang import MemberFailed
from tests.support.small import small

KINDS = pytest.mark.parametrize("kind", ["ddp", "fsdp"])


def starting_from(path: Path, storage: Path, kind: str) -> Config:
    """A run of the weights in a file, which is written here: other ones than the seed's."""
    torch.manual_seed(77)
    torch.save(build_model(small(storage).model).double().state_dict(), path)
    return small(storage, f"run.init_from={path}", f"parallel.kind={kind}", "checkpoint.every=1 steps")


def test_a_sharded_run_starts_from_the_same_weights_as_a_replicated_one(tmp_path: Path) -> None:
    ran = []
    for kind in ("ddp", "fsdp"):
        config = starting_from(tmp_path / "weights.pt", tmp_path / kind, kind)
        ran.append(drill(config, worlds=[3], stop_after=1).weights)
    check_equal(*ran)
    torch.manual_seed(1)
    of_the_seed = build_model(config.model).state_dict()
    assert (ran[0]["embed.weight"] - of_the_seed["embed.weight"]).abs().max() > 0.02


@KINDS
def test_a_run_goes_on_without_the_file_once_there_is_a_checkpoint(tmp_path: Path, kind: str) -> None:
    undisturbed = drill(starting_from(tmp_path / "weights.pt", tmp_path / "undisturbed", kind), worlds=[2])
    config = starting_from(tmp_path / "weights.pt", tmp_path / "moved", kind)
    drill(config, worlds=[2], stop_after=5)
    (tmp_path / "weights.pt").unlink()
    check_identical(drill(config, worlds=[2]), undisturbed)


def read_once() -> None:
    honest = WorkerState.load_initial

    def load_initial(self: WorkerState) -> None:
        honest(self)
        Path(self.config.run.init_from or "").unlink()

    WorkerState.load_initial = load_initial


def test_a_newcomer_needs_no_file_where_a_survivor_holds_the_state(tmp_path: Path) -> None:
    config = starting_from(tmp_path / "weights.pt", tmp_path, "ddp")
    undisturbed = drill(starting_from(tmp_path / "weights.pt", tmp_path / "undisturbed", "ddp"), worlds=[1])
    grown = drill(config, worlds=[[0], [1, 0]], leave_after=[3], patch=read_once)
    check_equal(grown.weights, undisturbed.weights)


@KINDS
def test_a_first_start_without_the_file_is_refused(tmp_path: Path, kind: str) -> None:
    config = starting_from(tmp_path / "weights.pt", tmp_path, kind)
    (tmp_path / "weights.pt").unlink()
    with pytest.raises(MemberFailed) as failure:
        drill(config, worlds=[2])
    said = f"UsageError: run.init_from: {tmp_path}/weights.pt cannot be loaded into this model: [Errno 2] No such file"
    assert str(failure.value).count(said) == (1 if kind == "ddp" else 2)


class Drawn(Gpt):
    """A model whose constructor draws from the generators of numpy and Python."""

    def __init__(self) -> None:
        super().__init__(small("nowhere").model)  # type: ignore[arg-type]
        with torch.no_grad():
            self.embed.weight.copy_(torch.from_numpy(np.random.randn(*self.embed.weight.shape)))
            self.embed.weight.mul_(random.random())


@KINDS
def test_a_model_that_draws_from_all_generators_begins_with_the_same_weights(tmp_path: Path, kind: str) -> None:
    words = "model={target: 'tests.dist.test_initial:Drawn'}", f"parallel.kind={kind}"
    runs = [drill(small(tmp_path / f"{size}", *words), worlds=[size], stop_after=3) for size in (1, 3)]
    check_equal(runs[0].weights, runs[1].weights)
