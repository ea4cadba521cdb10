"""Weights in the format of `torch.distributed.checkpoint`: torch's own functions are on the other side."""

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from steadfast.checkpoint.dcp import read_dcp, write_dcp
from steadfast.checkpoint.initial import load_weights
from steadfast.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2).bfloat16())


def save(content: dict[str, Any], folder: Path) -> Path:
    dcp.save(content, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return folder


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close({**found}, {**expected}, rtol=0, atol=0)


def test_torch_loads_what_was_written(tmp_path: Path) -> None:
    weights = model().state_dict()
    write_dcp(weights, tmp_path / "out")
    found = {"model": {name: torch.zeros_like(tensor) for name, tensor in weights.items()}}
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "out"), no_dist=True)
    check_equal(found["model"], weights)


def test_the_entry_of_a_model_is_read_wherever_a_program_saves_it(tmp_path: Path) -> None:
    weights = model().state_dict()
    optimizer = {"state": {"0.weight": {"exp_avg": torch.ones(3, 4)}}, "step": 5}
    check_equal(read_dcp(save({"model": weights, "optimizer": optimizer, "step": 5}, tmp_path / "trainer")), weights)
    check_equal(read_dcp(save({"app": {"model": weights, "optim": optimizer}}, tmp_path / "app")), weights)
    check_equal(read_dcp(save(weights, tmp_path / "flat")), weights)
    # Names that begin like the entry stay as they are.
    weights = {"model.layers.0.weight": torch.ones(2), "lm_head.weight": torch.zeros(3)}
    check_equal(read_dcp(save(weights, tmp_path / "alike")), weights)
    check_equal(read_dcp(save({"model": weights}, tmp_path / "nested")), weights)


def test_a_run_begins_from_such_a_folder(tmp_path: Path) -> None:
    saved = model()
    with torch.no_grad():
        saved.get_parameter("0.weight").fill_(3)
    other = model()
    load_weights(other, save({"model": saved.state_dict()}, tmp_path / "given"))
    check_equal(other.state_dict(), saved.state_dict())
    with pytest.raises(UsageError, match=r"run\.init_from: .*given cannot be loaded into this model"):
        load_weights(nn.Linear(2, 2), tmp_path / "given")


class Attack:
    def __reduce__(self) -> Any:
        return os.system, ("touch attacked",)


def test_code_in_the_metadata_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = save({"model": model().state_dict()}, tmp_path / "given")
    (folder / ".metadata").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(UsageError, match=r"names posix\.system, which does not belong there"):
        load_weights(model(), folder)
    assert not (tmp_path / "attacked").exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", "pipe"])
def test_metadata_that_lead_out_of_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    folder = save({"model": model().state_dict()}, tmp_path / "given")
    os.mkfifo(folder / "pipe")
    found = pickle.loads((folder / ".metadata").read_bytes())
    found.storage_data = {key: replace(info, relative_path=name) for key, info in found.storage_data.items()}
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(UsageError, match=r"is no file|is outside of the folder"):
        load_weights(model(), folder)


@pytest.mark.parametrize("damage", ["missing", "cut", "no tensors"])
def test_a_damaged_folder_is_refused(tmp_path: Path, damage: str) -> None:
    folder = save({"step": 5} if damage == "no tensors" else {"model": model().state_dict()}, tmp_path / "given")
    (data,) = folder.glob("*.distcp")
    if damage == "missing":
        data.unlink()
    elif damage == "cut":
        data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(UsageError, match=r"run\.init_from: .*given cannot be loaded"):
        load_weights(model(), folder)
