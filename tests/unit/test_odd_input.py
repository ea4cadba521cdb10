"""Files that nobody would write on purpose: each is one message, with its place and what to do, and none takes long."""

import hashlib
import json
import os
import pickle
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from steadfast.checkpoint.catalog import Catalog, Damaged, path_of
from steadfast.checkpoint.initial import load_weights
from steadfast.checkpoint.manifest import FileDigest, Manifest, _digest
from steadfast.checkpoint.shards import StagingBuffer, shards_of
from steadfast.checkpoint.weights import read_whole
from steadfast.config import dump_config, load_config, parse_config
from steadfast.errors import ConfigError, SteadfastError, StorageError, UsageError
from steadfast.launch.resume import start_or_resume
from steadfast.run.directory import RunDirectory
from steadfast.run.events import RunStarted
from steadfast.run.owner import Ownership
from steadfast.storage import LocalStore
from tests.support.command import ROOT
from tests.support.verbs import printed

SECOND_S = 5.0  # no file here is worth more, on any machine
NESTED = b"[" * 100_000


def bomb(indent: str = "") -> str:
    lines = [f"{indent}a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{indent}a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    return "\n".join(lines)


CONFIGS: dict[str, tuple[bytes, str]] = {
    "NUL": (b"run: {steps: 5}\n\0", "odd.yaml:2: not valid YAML: a character that no text has"),
    "control character": (b"run: {steps: 5} # \x07\n", "odd.yaml:1: not valid YAML: a character that no text has"),
    "Latin-1": (b"run:\n  steps: 5 # \xe9\n", "odd.yaml:2: not UTF-8 text: byte 0xe9. Save the file as UTF-8"),
    "UTF-16": ("run: {steps: 5}\n".encode("utf-16"), "odd.yaml:1: not UTF-8 text: byte 0xff. Save the file as UTF-8"),
    "alias of itself": (b"faults: {inject: &a [*a]}\n", "odd.yaml:1: not valid YAML: an alias within what it names"),
    "alias bomb": (bomb().encode(), "odd.yaml:5: not valid YAML: aliases that stand for more than 10000 values"),
    "alias bomb in arguments": (
        f"model:\n  target: a:b\n  args:\n{bomb('    ')}".encode(),
        "odd.yaml:8: not valid YAML: aliases that stand for more than 10000 values",
    ),
    "nested lists": (b"run: " + b"[" * 1500 + b"]" * 1500, "odd.yaml:1: not valid YAML: nested more than 50 deep"),
    "nested maps": (b"run: " + b"{a: " * 1500 + b"}" * 1500, "odd.yaml:1: not valid YAML: nested more than 50 deep"),
    "huge int": (b"run: {steps: " + b"9" * 5000 + b"}", "odd.yaml:1: not valid YAML: a number of 5000 characters"),
    "ten megabytes": (b"# " + b"x" * 10_000_000, "odd.yaml: more than 2097152 bytes, the most that a"),
    "twice on one line": (b"run: {steps: 300, steps: 400}\n", "odd.yaml:1: run.steps: given twice"),
    "twice on two lines": (b"run:\n  steps: 5\n  steps: 6\n", "odd.yaml:3: run.steps: given twice, first on line 2"),
    "true for a number": (b"run: {steps: true}\n", "odd.yaml:1: run.steps: must be a valid integer"),
    "yes for a number": (b"optimizer: {lr: yes}\n", "odd.yaml:1: optimizer.lr: must be a valid number"),
    "true for a range": (b"scaling: {num_workers: true}\n", "odd.yaml:1: scaling.num_workers: must be"),
    "true in a range": (b"scaling: {num_workers: [true, 4]}\n", "odd.yaml:1: scaling.num_workers.0: must be"),
    "minutes for a number": (b"run: {steps: 1:30}\n", "odd.yaml:1: run.steps: must be a valid integer, "),
    "no bool": (b"run:\n  epochs: !!bool maybe\n", "odd.yaml:2: not valid YAML: not a valid bool"),
    "no date": (b"run: {epochs: !!timestamp abc}\n", "odd.yaml:1: run.epochs: must be a valid integer"),
    "no bytes": (b'run: {name: !!binary "gA="}\n', "odd.yaml:1: not valid YAML: "),
    "NUL in a path": (b'run: {storage: "a\\0b"}\n', "odd.yaml:1: run.storage: must not have NUL"),
    "half a character": (b'run: {storage: "\\ud800"}\n', "odd.yaml:1: run.storage: must be a valid string"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    text, said = CONFIGS[case]
    monkeypatch.chdir(tmp_path)
    Path("odd.yaml").write_bytes(text)
    began = time.monotonic()
    with pytest.raises(ConfigError) as refused:
        load_config("odd.yaml")
    assert said in str(refused.value)
    assert len(refused.value.problems) == 1
    assert time.monotonic() - began < SECOND_S


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("scaling={num_workers: 2, num_workers: 3}", "override: scaling.num_workers: given twice"),
        ("run.steps=true", "override: run.steps: must be a valid integer"),
        ("batch.balance={A100: true}", "override: batch.balance.A100: must be a valid number"),
        ("run.steps=1:30", "override: run.steps: must be a valid integer"),
        ("run.steps=" + "9" * 5000, "override: run.steps: Unable to parse input string as an integer"),
    ],
)
def test_an_override(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config("", overrides=[override])
    assert said in str(refused.value)


def test_numbers_mean_what_they_say_and_a_key_of_a_merge_may_be_overridden() -> None:
    config = parse_config("run: {steps: 010}\ncluster: {env: {AT: 1:30, OLD: 010, HEX: 0x1f}}")
    assert (config.run.steps, dict(config.cluster.env)) == (10, {"AT": "1:30", "OLD": "010", "HEX": "31"})
    config = parse_config("optimizer:\n  <<: {lr: 0.5, weight_decay: 0.25}\n  lr: 0.125\n")
    assert (config.optimizer.lr, getattr(config.optimizer, "weight_decay", None)) == (0.125, 0.25)


@pytest.mark.parametrize("name", ["2026-11-24", "2026-13-45"])
def test_a_date_is_text(name: str) -> None:
    for config in (parse_config(f"run: {{name: {name}}}"), parse_config("", overrides=[f"run.name={name}"])):
        assert config.run.name == name
        assert parse_config(dump_config(config)).run.name == name


def begin(directory: RunDirectory) -> bool:
    config = parse_config("run: {steps: 5}", "config.yaml", [f"run.storage={Path(directory.uri).parent}"])
    return start_or_resume(config, directory, RunStarted(launcher="ray"), print)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.yaml", b"", "config.yaml is empty. Restore the file"),
        ("config.yaml", b"\0\0", "config.yaml:1: not valid YAML: a character that no text has"),
        ("config.yaml", b"\xff\xfe", "config.yaml:1: not UTF-8 text"),
        ("config.yaml", b"garbage: [", "config.yaml:1: not valid YAML"),
        ("summary.json", b"{}", None),
        ("summary.json", b'{"status": "finished"}', None),
        ("summary.json", b'{"status": "finished", "step": "x", "metrics": null}', None),
        ("summary.json", b"[1]", None),
        ("summary.json", NESTED, None),
        ("request.json", b"{}", None),
        ("request.json", b'{"num_workers": 5}', None),
        ("request.json", b'{"num_workers": ["a", 2]}', None),
        ("request.json", b'{"num_workers": [3, 2]}', None),
        ("request.json", b'{"num_workers": [true, 2]}', None),
        ("request.json", b'{"kill": -1}', None),
        ("requests/1", b'{"kill": "1"}', None),
        ("requests/2", NESTED, None),
        ("events.jsonl", b'5\nnull\n{}\n{"event": []}\n{"event": "rollback"}\n\0\n{"eve', None),
        ("steps.jsonl", b'5\nnull\n{}\n{"step": "x"}\n{"step": 3, "time_s": []}\n\xff\n', None),
    ],
)
def test_a_file_of_a_run(tmp_path: Path, name: str, content: bytes, said: str | None) -> None:
    directory = RunDirectory(LocalStore(tmp_path / "run"))
    (tmp_path / "run" / name).parent.mkdir(parents=True)
    (tmp_path / "run" / name).write_bytes(content)
    if said is None:
        assert begin(directory)
        assert directory.amendments().skip == frozenset()
        assert directory.last_step_line() == {}
        assert directory.pop_requests() == []
    else:
        with pytest.raises(SteadfastError) as refused:
            begin(directory)
        assert said in str(refused.value)
        assert str(tmp_path / "run") in str(refused.value)


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """The folder of a run that has done nothing."""
    directory = RunDirectory(LocalStore(tmp_path / "run"))
    Ownership.claim(directory.store).release()
    directory.write_config(parse_config(""))
    return tmp_path / "run"


@pytest.mark.parametrize(
    "words", ["report", "audit --samples=100", "doctor", "export --out=x.pt", "compare other", "status"]
)
def test_links_in_a_circle_are_one_line_of_every_verb(
    words: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("steps.jsonl", "events.jsonl", "checkpoints"):
        (finished / name).symlink_to(name)
    (finished.parent / "other").symlink_to(finished)
    verb, *rest = words.split()
    said = printed(capsys, verb, "run", *rest, "--storage", finished.parent, code=1).err
    assert said.startswith("error: ")
    assert said.endswith("cannot be read: Too many levels of symbolic links\n")


@pytest.mark.parametrize("number", ["0", "-1", "99999999999999999999"])
def test_audit_refuses_a_number_of_samples_that_no_dataset_has(
    number: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = printed(capsys, "audit", finished, f"--samples={number}", code=2).err
    assert f"--samples {number}: must be from 1 to 281474976710656" in said


def test_a_verb_ends_quietly_when_the_reader_of_its_output_has_left(finished: Path) -> None:
    for step in range(3000):
        (finished / path_of(step)).mkdir(parents=True)
    command = f"{sys.executable} {ROOT}/main.py doctor {finished} | head -n 1"
    answer = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (answer.stdout, answer.stderr) == ("step 2999: unfinished, never committed\n", "")


def test_a_configuration_of_a_hole_is_not_read_whole(tmp_path: Path) -> None:
    with (tmp_path / "odd.yaml").open("wb") as file:
        file.truncate(2**43)
    with pytest.raises(ConfigError, match=r"odd\.yaml: more than 2097152 bytes"):
        load_config(str(tmp_path / "odd.yaml"))


@pytest.mark.parametrize("name", ["a" * 5000, "/proc/self/mem"])
def test_a_configuration_that_cannot_be_read_is_one_line(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^.{14,200}: cannot be read: (File name too long|Input/output error)$"):
        load_config(name)


@pytest.mark.parametrize("name", ["config.yaml", "environment.json", "events.jsonl"])
def test_a_folder_in_the_place_of_a_file_of_a_run(tmp_path: Path, name: str) -> None:
    (tmp_path / "run" / name).mkdir(parents=True)
    with pytest.raises(StorageError, match=f"{name}.*s a directory"):
        begin(RunDirectory(LocalStore(tmp_path / "run")))


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    """With a checkpoint of step 5."""
    catalog = Catalog(LocalStore(tmp_path))
    staged = StagingBuffer()
    staged.fill(shards_of({"model": nn.Linear(4, 3).state_dict()}))
    data = b"".join(staged.chunks())
    catalog.write(5, "rank-0", [data])
    digest = FileDigest(hashlib.sha256(data).hexdigest(), len(data))
    catalog.commit(Manifest(5, 1, 1, 0.0, "data", {"rank-0": digest}))
    return catalog


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a file above": lambda content: content["files"].update({"../../etc/passwd": content["files"]["rank-0"]}),
    "a file below": lambda content: content["files"].update({"a/b": content["files"]["rank-0"]}),
    "itself": lambda content: content["files"].update({"..": content["files"]["rank-0"]}),
    "no length": lambda content: content["files"]["rank-0"].update(bytes="x"),
    "a step in words": lambda content: content.update(step="five"),
    "no list of steps": lambda content: content.update(skipped=["a"]),
    "no list of ends": lambda content: content.update(ends=[["a", 1]]),
    "forwards of no size": lambda content: content.update(forward_size="4"),
    "no metrics": lambda content: content.update(metrics=None),
    "no time": lambda content: content.update(time_s=None),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_that_somebody_else_has_signed(catalog: Catalog, tmp_path: Path, case: str) -> None:
    path = tmp_path / path_of(5) / "manifest.json"
    content = json.loads(path.read_text())
    del content["sha256"]
    MANIFESTS[case](content)
    for data in (json.dumps({**content, "sha256": _digest(content)}).encode(), NESTED):
        path.write_bytes(data)
        with pytest.raises(Damaged, match=r"manifest.json is damaged"):
            catalog.manifest(5)


def header(entry: Any, box: Any, length: int | None = None) -> bytes:
    named: dict[str, Any] = {"model.weight": entry, "__metadata__": {"boxes": json.dumps({"model.weight": box})}}
    text = json.dumps(named).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(48)


FLOATS = {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}
SHARDS = {
    "four bytes": b"1234",
    "a huge header": struct.pack("<Q", 2**63) + b"{}",
    "no JSON": struct.pack("<Q", 3) + b"abc",
    "no boxes": struct.pack("<Q", 2) + b"{}",
    "a list": struct.pack("<Q", 2) + b"[]",
    "no box for it": header(FLOATS, None),
    "an unknown type": header({**FLOATS, "dtype": "X"}, [[3, 4], [0, 0]]),
    "another length": header({**FLOATS, "data_offsets": [0, 4]}, [[3, 4], [0, 0]]),
    "beyond its box": header(FLOATS, [[3, 4], [1, 0]]),
    "before its box": header(FLOATS, [[3, 4], [-1, 0]]),
    "other dimensions": header(FLOATS, [[3], [0]]),
    "four terabytes": header({**FLOATS, "shape": [10**12], "data_offsets": [0, 4 * 10**12]}, [[10**12], [0]]),
    "no numbers": header({**FLOATS, "shape": ["a"]}, [[3, 4], [0, 0]]),
}


@pytest.mark.parametrize("case", SHARDS)
def test_a_shard_that_somebody_else_has_written(catalog: Catalog, case: str) -> None:
    data = SHARDS[case]
    catalog.store.write(f"{path_of(5)}/rank-0", [data])
    digest = FileDigest(hashlib.sha256(data).hexdigest(), len(data))
    catalog.commit(Manifest(5, 1, 1, 0.0, "data", {"rank-0": digest}))
    with pytest.raises(StorageError, match=r"no run has written|does not fit into memory|ends before"):
        read_whole(catalog, 5)


class Executes:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def save(value: Any) -> Callable[[Path], object]:
    return lambda path: torch.save(value, path)


# How a file is written, and what is said of it where torch loads it.
WEIGHTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "text": (lambda path: path.write_text("hello"), "."),
    "nothing": (lambda path: path.touch(), "."),
    "noise": (lambda path: path.write_bytes(bytes(range(256)) * 9), "."),
    "a pickle": (lambda path: path.write_bytes(pickle.dumps(Executes(), 2)), "."),
    "code": (save({"weight": Executes()}), "."),
    "int keys": (save({1: torch.zeros(1)}), "it is no state_dict: 1 names a Tensor, not a tensor"),
    "a number": (save({"weight": 5}), "it is no state_dict: 'weight' names a int, not a tensor"),
    "a nested state": (save({"nets": {"a": torch.ones(1)}}), "it is no state_dict: 'nets' names a dict, not a tensor"),
    "a list": (save([1, 2]), "it holds a list, not a state_dict"),
    "a tensor": (save(torch.zeros(3)), "."),
    "None": (save(None), "."),
    "an empty state": (save({}), "."),
    "a folder": (lambda path: path.mkdir(), "."),
}


@pytest.mark.parametrize("case", WEIGHTS)
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_weights_to_start_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, suffix: str) -> None:
    monkeypatch.chdir(tmp_path)
    write, said = WEIGHTS[case]
    write(tmp_path / f"odd{suffix}")
    why = said if suffix == ".pt" else "."
    with pytest.raises(UsageError, match=rf"run.init_from: .*odd.* cannot be loaded into this model: {why}"):
        load_weights(nn.Linear(4, 3), tmp_path / f"odd{suffix}")
    assert not Path("executed").exists()


def test_more_workers_than_there_is_work_for(tmp_path: Path) -> None:
    from steadfast.commands.scale import _check_useful

    directory = RunDirectory(LocalStore(tmp_path))
    directory.write_config(parse_config("batch: {global_size: 80, microbatch_size: 8}"))
    _check_useful(directory, 1, 10)
    with pytest.raises(UsageError, match=r"--workers up to 99999: a global batch .* is 10 microbatches"):
        _check_useful(directory, 1, 99999)
    directory.write_config(parse_config("batch: {global_size: 80, microbatch_size: auto}"))
    _check_useful(directory, 1, 80)
    directory.write_microbatch_size(16)
    with pytest.raises(UsageError, match=r"is 5 microbatches \(batch.global_size 80, batch.microbatch_size 16\)"):
        _check_useful(directory, 1, 6)


def test_a_working_directory_that_has_been_deleted(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    command = f"cd {tmp_path}/gone && rmdir ../gone && {sys.executable} {ROOT}/main.py --config ddp.yaml"
    answer = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    assert answer.stderr == "error: the working directory has been deleted; change to one that exists\n"
