"""Weights that a run starts from: files of `export`, and folders of Hugging Face."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from steadfast.checkpoint.initial import Loaded, load_weights
from steadfast.config import Config, parse_config
from steadfast.errors import UsageError
from steadfast.loop.worker_state import WorkerState
from tests.support.small import MLP

CPU = torch.device("cpu")


def config(path: Path) -> Config:
    return parse_config(f"{MLP}\nrun: {{init_from: {path}}}")


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_a_run_may_start_from_exported_weights(tmp_path: Path, suffix: str) -> None:
    first = WorkerState(parse_config(f"{MLP}\nrun: {{seed: 5}}"), CPU)
    path = tmp_path / f"weights.{suffix}"
    weights = first.model.state_dict()
    torch.save(weights, path) if suffix == "pt" else safetensors.torch.save_file(weights, path)
    started = WorkerState(config(path), CPU)
    started.load_initial()
    for name, tensor in started.model.state_dict().items():
        assert torch.equal(tensor, weights[name])


class Tied(nn.Module):
    """As language models have it: the last layer's weight is the first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("written", ["embedding.weight", "head.weight"])
def test_a_folder_of_hugging_faces_may_be_sharded_and_lack_tied_names(tmp_path: Path, written: str) -> None:
    torch.manual_seed(1)
    weights = Tied().state_dict()
    body = {name: weights[name] for name in ("body.weight", "body.bias")}
    parts = {"one.safetensors": {written: weights[written]}, "two.safetensors": body}
    for file, part in parts.items():
        safetensors.torch.save_file(part, tmp_path / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    model = Tied()
    assert load_weights(model, tmp_path) == Loaded()
    assert model.head.weight is model.embedding.weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name])


def test_what_fits_is_loaded_where_that_is_asked_for(tmp_path: Path) -> None:
    base = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).state_dict()
    old = {"old.weight": base["1.weight"]}
    torch.save({"0.weight": base["0.weight"], "0.bias": base["0.bias"], **old}, tmp_path / "a.pt")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    with pytest.raises(UsageError, match=r"(?s)Missing key.*With run.init_strict=false what fits is loaded"):
        load_weights(model, tmp_path / "a.pt")
    found = load_weights(model, tmp_path / "a.pt", strict=False)
    assert found == Loaded(("1.weight", "1.bias"), ("old.weight",))
    assert torch.equal(model.state_dict()["0.weight"], base["0.weight"])
    torch.save(old, tmp_path / "b.pt")
    with pytest.raises(UsageError, match=r"none of its names is the model's; it has old.weight"):
        load_weights(model, tmp_path / "b.pt", strict=False)
    with pytest.raises(UsageError, match=r"neither model.safetensors nor pytorch_model.bin"):
        load_weights(model, tmp_path)
    with pytest.raises(UsageError, match=r"run.init_from: .*No such file"):
        load_weights(model, tmp_path / "none.pt")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "it.pt is empty"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n",
            "it.pt is only a pointer: run git lfs pull",
        ),
        (b"<!DOCTYPE html>", "it is no file of torch.save"),
        ({"w": np.float32(3.0)}, "it holds a numpy._core.multiarray.scalar; save the model's state_dict alone"),
        ({"args": argparse.Namespace()}, "it holds a argparse.Namespace; save the model's state_dict alone"),
        (nn.Linear(3, 2), "it holds a torch.nn.modules.linear.Linear; save the model's state_dict alone"),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_file_that_holds_no_weights_has_one_line_with_a_remedy(
    tmp_path: Path, content: Any, says: str, strict: bool
) -> None:
    if isinstance(content, bytes):
        (tmp_path / "it.pt").write_bytes(content)
    else:
        torch.save(content, tmp_path / "it.pt")
    with pytest.raises(UsageError) as raised:
        load_weights(nn.Linear(3, 2), tmp_path / "it.pt", strict)
    assert str(raised.value).endswith(f"cannot be loaded into this model: {says}")


@pytest.mark.parametrize(
    ("entry", "prefix"), [("state_dict", "net."), ("model", ""), ("model_state_dict", "module."), (None, "_orig_mod.")]
)
def test_files_of_other_trainers_are_read(tmp_path: Path, entry: str | None, prefix: str) -> None:
    """Lightning's .ckpt and checkpoints of plain loops have the weights in an entry, and a module around the model."""
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    weights: dict[str, Any] = {f"{prefix}{name}": tensor for name, tensor in model.state_dict().items()}
    if entry == "state_dict":
        weights["loss.scale"] = torch.ones(())
    content = weights if entry is None else {entry: weights, "epoch": 3, "optimizer_states": [{"state": {}}]}
    torch.save(content, tmp_path / "theirs.ckpt")
    load_weights(other, tmp_path / "theirs.ckpt")
    torch.testing.assert_close(other.state_dict(), model.state_dict())


def test_the_part_that_fits_best_is_taken_and_two_are_refused(tmp_path: Path) -> None:
    """A checkpoint of a teacher and a student, or of a model and its average."""
    model = nn.Linear(3, 2)
    part = {f"student.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save(part | {"head.weight": torch.ones(5)}, tmp_path / "one.pt")
    load_weights(nn.Linear(3, 2), tmp_path / "one.pt")
    torch.save(part | {f"teacher.{name}": tensor for name, tensor in model.state_dict().items()}, tmp_path / "two.pt")
    with pytest.raises(UsageError, match="its parts student, teacher fit equally well"):
        load_weights(nn.Linear(3, 2), tmp_path / "two.pt")


@pytest.mark.parametrize(
    "index", ["nonsense", "{}", "[]", *(json.dumps({"weight_map": {"a": name}}) for name in ("none.bin", "../a", "/a"))]
)
def test_an_index_that_names_no_files_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UsageError, match=r"run.init_from: .* cannot be loaded into this model"):
        load_weights(Tied(), tmp_path)


@pytest.mark.parametrize("name", ["../secret.bin", "a/../../secret.bin", "PLACE/secret.bin", "pipe"])
def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    model, folder = nn.Linear(3, 2), tmp_path / "given"
    torch.save(model.state_dict(), tmp_path / "secret.bin")
    (folder / "a").mkdir(parents=True)
    os.mkfifo(folder / "pipe")
    weight_map = {"weight": name.replace("PLACE", str(tmp_path))}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UsageError, match=r"is no file|is outside of the folder"):
        load_weights(model, folder)
