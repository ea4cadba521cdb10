"""`export` and `doctor`: what is in a checkpoint, for people and for plain PyTorch."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from steadfast.checkpoint.catalog import Catalog, path_of
from steadfast.checkpoint.initial import Loaded, load_weights
from steadfast.checkpoint.manifest import FileDigest, Manifest
from steadfast.checkpoint.shards import StagingBuffer, shards_of
from steadfast.cli import main
from steadfast.components.worker_state import WorkerState
from steadfast.config import Config, parse_config
from steadfast.errors import UsageError
from steadfast.run.directory import RunDirectory
from steadfast.run.owner import Ownership
from steadfast.storage import LocalStore

MLP = """
model: {kind: mlp, in_features: 4, hidden: [3], out_features: 2}
task: {kind: classification}
data: {target: 'tests.support.small:Tokens'}
"""


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


@pytest.fixture
def run(tmp_path: Path, model: nn.Module) -> Path:
    """With checkpoints of steps 5 and 9, of which the later one has other weights."""
    Ownership.claim(LocalStore(tmp_path)).release()
    catalog = Catalog(LocalStore(tmp_path))
    for step in (5, 9):
        with torch.no_grad():
            model.get_parameter("0.weight").fill_(step)
        staged = StagingBuffer()
        staged.fill(shards_of({"model": model.state_dict(), "optimizer": {"0.weight": {"step": torch.tensor(3.0)}}}))
        data = b"".join(staged.chunks())
        catalog.write(step, "rank-0", [data])
        files = {"rank-0": FileDigest(hashlib.sha256(data).hexdigest(), len(data))}
        catalog.commit(Manifest(step, 1, 1, 0.0, "data", files, metrics={"loss": 0.25}))
    RunDirectory(catalog.store).write_config(parse_config(MLP))
    return tmp_path


def command(*words: object) -> int:
    return main(0.0, [str(word) for word in words])


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_plain_pytorch_loads_what_was_exported(
    run: Path, model: nn.Module, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run / f"weights.{suffix}"
    assert command("export", run, "--out", out) == 0
    assert "4 tensors of step 9" in capsys.readouterr().out
    load = safetensors.torch.load_file if suffix == "safetensors" else torch.load
    other = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    other.load_state_dict(load(out))
    assert torch.equal(other(torch.ones(2, 4)), model(torch.ones(2, 4)))


def test_a_step_may_be_chosen(run: Path) -> None:
    assert command("export", run, "--step", 5, "--out", run / "five.pt") == 0
    assert float(torch.load(run / "five.pt")["0.weight"][0, 0]) == 5.0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--out", "weights.bin"], 2, "must end in .safetensors or .pt"),
        (["--out", "weights.pt", "--step", "6"], 2, "holds no checkpoint of step 6"),
        ([], 2, "export takes one run and --out, for example: export ddp --out model.safetensors"),
        (["--out", "model", "--format", "hf"], 2, "--format hf: Mlp has no save_pretrained; use safetensors or pt"),
        (["--out", "no/such/folder/weights.pt"], 1, "cannot be written"),
    ],
)
def test_what_cannot_be_exported_is_told(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, said: str
) -> None:
    assert command("export", run, *words) == code
    assert said in capsys.readouterr().err


def test_a_model_of_code_that_the_run_names_is_not_built_unless_it_is_told_to(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = f"model: {{target: 'os:system', args: {{command: 'touch {run}/touched'}}}}"
    text = MLP.replace("model: {kind: mlp, in_features: 4, hidden: [3], out_features: 2}", model)
    RunDirectory(LocalStore(run)).write_config(parse_config(text))
    assert command("export", run, "--format", "hf", "--out", run / "hf") == 2
    said = capsys.readouterr().err
    assert said.startswith("error: model.target os:system: the run's config.yaml names this code")
    assert f"main.py export {run} --format hf --out {run}/hf --trust-code" in said
    assert not (run / "touched").exists()
    assert command("export", run, "--out", run / "weights.pt") == 0  # which builds no model
    assert command("export", run, "--format", "hf", "--out", run / "hf", "--trust-code") == 2
    assert "returned a int, not a torch.nn.Module" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_refused_and_nothing_is_left(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(run)
    assert command("export", run, "--out", run / "weights.pt") == 1
    assert "step 9 is damaged: checkpoints/step-00000009/rank-0 has other contents" in capsys.readouterr().err
    assert not [*run.glob("*weights*")]


def test_the_doctor_names_what_is_damaged_and_changes_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("doctor", run) == 0
    assert capsys.readouterr().out.startswith("step 9: good | ")
    damage(run)
    Catalog(LocalStore(run)).write(11, "rank-0", [b"half"])
    before = sorted(run.rglob("*"))
    assert command("doctor", run) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 11: unfinished, never committed"
    assert lines[1].startswith("step 9: damaged: checkpoints/step-00000009/rank-0 has other contents")
    assert "loss 0.2500" in lines[2]
    assert sorted(run.rglob("*")) == before


def damage(run: Path) -> None:
    path = run / path_of(9) / "rank-0"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def config(path: Path) -> Config:
    return parse_config(f"{MLP}\nrun: {{init_from: {path}}}")


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_a_run_may_start_from_exported_weights(tmp_path: Path, suffix: str) -> None:
    first = WorkerState(parse_config(f"{MLP}\nrun: {{seed: 5}}"), torch.device("cpu"))
    path = tmp_path / f"weights.{suffix}"
    weights = first.model.state_dict()
    torch.save(weights, path) if suffix == "pt" else safetensors.torch.save_file(weights, path)
    started = WorkerState(config(path), torch.device("cpu"))
    started.load_initial()
    for name, tensor in started.model.state_dict().items():
        assert torch.equal(tensor, weights[name])


def test_weights_of_another_model_are_refused(run: Path) -> None:
    torch.save({"other": torch.zeros(1)}, run / "weights.pt")
    for path, said in ((run / "weights.pt", "Missing key"), (run / "none.pt", "No such file")):
        with pytest.raises(Exception, match=said) as raised:
            WorkerState(config(path), torch.device("cpu")).load_initial()
        assert "run.init_from" in str(raised.value)


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
    parts = {"one.safetensors": {written: weights[written]}, "two.safetensors": {}}
    parts["two.safetensors"] = {name: weights[name] for name in ("body.weight", "body.bias")}
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
    torch.save(
        {"0.weight": base["0.weight"], "0.bias": base["0.bias"], "old.weight": base["1.weight"]}, tmp_path / "a.pt"
    )
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    with pytest.raises(UsageError, match=r"(?s)Missing key.*With run.init_strict=false what fits is loaded"):
        load_weights(model, tmp_path / "a.pt")
    found = load_weights(model, tmp_path / "a.pt", strict=False)
    assert found == Loaded(("1.weight", "1.bias"), ("old.weight",))
    assert torch.equal(model.state_dict()["0.weight"], base["0.weight"])
    torch.save({"old.weight": base["1.weight"]}, tmp_path / "b.pt")
    with pytest.raises(UsageError, match=r"none of its names is the model's; it has old.weight"):
        load_weights(model, tmp_path / "b.pt", strict=False)
    with pytest.raises(UsageError, match=r"neither model.safetensors nor pytorch_model.bin"):
        load_weights(model, tmp_path)


@pytest.mark.parametrize("index", ["nonsense", "{}", "[]", '{"weight_map": {"a": "none.safetensors"}}'])
def test_an_index_that_names_no_files_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UsageError, match=r"run.init_from: .* cannot be loaded into this model"):
        load_weights(Tied(), tmp_path)


@pytest.mark.parametrize("data", [b"", b"nonsense", pickle.dumps([1, 2], 2)])
@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_what_holds_no_weights_is_refused(tmp_path: Path, suffix: str, data: bytes) -> None:
    path = tmp_path / f"weights.{suffix}"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"run.init_from: .* cannot be loaded into this model"):
        WorkerState(config(path), torch.device("cpu")).load_initial()
