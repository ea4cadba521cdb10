"""`export` and `doctor`: what is in a checkpoint, for people and for plain PyTorch."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from steadfast.checkpoint.catalog import Catalog, path_of
from steadfast.checkpoint.manifest import FileDigest, Manifest
from steadfast.checkpoint.shards import StagingBuffer, shards_of
from steadfast.cli import main
from steadfast.config import parse_config
from steadfast.run.directory import RunDirectory
from steadfast.run.owner import Ownership
from steadfast.storage import LocalStore
from tests.support.json_tables import check_document
from tests.support.small import MLP
from tests.support.verbs import printed


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
    assert "4 tensors of step 9" in printed(capsys, "export", run, "--out", out).out
    (run / "other").touch()
    assert out.stat().st_mode == (run / "other").stat().st_mode  # whoever may read other files may read this one
    load = safetensors.torch.load_file if suffix == "safetensors" else torch.load
    other = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    other.load_state_dict(load(out))
    assert torch.equal(other(torch.ones(2, 4)), model(torch.ones(2, 4)))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_loader_reads_a_folder_of_dcp(run: Path, model: nn.Module) -> None:
    out = run / "dcp"
    assert command("export", run, "--out", out, "--format", "dcp") == 0
    found = {"model": {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}}
    dcp.load(found, storage_reader=dcp.FileSystemReader(out), no_dist=True)
    assert torch.equal(found["model"]["0.weight"], model.get_parameter("0.weight"))
    assert command("export", run, "--out", out, "--format", "dcp") == 2


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
    assert said in printed(capsys, "export", run, *words, code=code).err


def test_a_model_of_code_that_the_run_names_is_not_built_unless_it_is_told_to(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = f"model: {{target: 'os:system', args: {{command: 'touch {run}/touched'}}}}"
    text = MLP.replace("model: {kind: mlp, in_features: 4, hidden: [3], out_features: 2}", model)
    RunDirectory(LocalStore(run)).write_config(parse_config(text))
    said = printed(capsys, "export", run, "--format", "hf", "--out", run / "hf", code=2).err
    assert said.startswith("error: model.target os:system: the run's config.yaml names this code")
    assert f"steadfast export {run} --format hf --out {run}/hf --trust-code" in said
    assert not (run / "touched").exists()
    assert command("export", run, "--out", run / "weights.pt") == 0  # which builds no model
    assert command("export", run, "--format", "hf", "--out", run / "hf", "--trust-code") == 2
    assert "returned a int, not a torch.nn.Module" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_refused_and_another_step_may_be_chosen(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run)
    assert command("export", run, "--out", run / "weights.pt") == 1
    assert "step 9 is damaged: checkpoints/step-00000009/rank-0 has other contents" in capsys.readouterr().err
    assert not [*run.glob("*weights*")]
    assert command("export", run, "--step", 5, "--out", run / "five.pt") == 0
    assert float(torch.load(run / "five.pt")["0.weight"][0, 0]) == 5.0


@pytest.mark.parametrize(
    ("name", "kind"), [("weights.safetensors", "safetensors"), ("weights.pt", "pt"), ("dcp", "dcp")]
)
def test_an_export_deletes_the_files_of_a_killed_one(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    out = tmp_path / "out" / name
    out.parent.mkdir()
    words = ["export", run, "--out", out, "--format", kind]
    with monkeypatch.context() as killed:  # which deletes nothing
        killed.setattr("shutil.rmtree", lambda *_, **__: None)
        killed.setattr("steadfast.commands.export.sync_tree", lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            command(*words)
    [left] = out.parent.iterdir()
    for folder in (left, left / name):
        if folder.is_dir():
            (folder / "model-00002-of-00002").touch()  # as of another model
    assert command(*words) == 0
    assert [*out.parent.iterdir()] == [out]
    assert not [*out.parent.rglob("model-*")]


@pytest.mark.parametrize(("name", "kind"), [("weights.pt", "pt"), ("dcp", "dcp")])
def test_an_export_is_on_the_disk_before_its_name(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    done: list[Path] = []
    link = "/proc/self/fd/{}".format
    monkeypatch.setattr("os.fsync", lambda descriptor: done.append(Path(os.readlink(link(descriptor)))))
    out = tmp_path / "out" / name
    out.parent.mkdir()
    assert command("export", run, "--out", out, "--format", kind) == 0
    written = [out, *out.rglob("*")]
    assert {out.parent / f".{name}.partial" / path.relative_to(out.parent) for path in written} <= {*done[:-1]}
    assert done[-1] == out.parent


def test_the_doctor_names_what_is_damaged_and_changes_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "doctor", run).out.startswith("step 9: good | ")
    damage(run)
    Catalog(LocalStore(run)).write(11, "rank-0", [b"half"])
    before = sorted(run.rglob("*"))
    lines = printed(capsys, "doctor", run, code=1).out.splitlines()
    assert lines[0] == "step 11: unfinished, never committed"
    assert lines[1].startswith("step 9: damaged: checkpoints/step-00000009/rank-0 has other contents")
    assert "loss 0.2500" in lines[2]
    assert sorted(run.rglob("*")) == before
    shown = printed(capsys, "doctor", run, "--json", code=1)
    assert shown.err.splitlines()[:2] == lines[:2]
    found = json.loads(shown.out)
    check_document("`doctor` of a run", found)
    states = [(each["step"], each["state"]) for each in found["checkpoints"]]
    assert states == [(11, "unfinished"), (9, "damaged"), (5, "good")]


def damage(run: Path) -> None:
    path = run / path_of(9) / "rank-0"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
