"""`index`: a stream becomes shards with the same samples, also after an interruption."""

import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from steadfast.cli import main
from steadfast.config import parse_config
from steadfast.data import build_dataset, write_shards
from steadfast.errors import DataError

HERE = "tests.unit.test_index"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("steadfast.commands.index", "steadfast.data.shard_files"):
        monkeypatch.setattr(f"{module}.runs_root", lambda: tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "index.yaml").write_text("")


class Stream(IterableDataset[Any]):
    """Mappings of every kind of value."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(473, 2973):
            yield {
                "label": number,
                "weight": np.float32(number / 7),
                "tokens": torch.arange(number % 5),
                "image": np.full((2, 3), number, np.float32),
                "text": f"sample {number}",
                "raw": bytes([number % 256]),
                "mask": np.arange(3) > number % 3,
            }


def pairs() -> list[tuple[torch.Tensor, int]]:
    return [(torch.full((3,), float(number)), number) for number in range(10)]


def empty() -> list[Any]:
    return []


def index(target: str, *words: str) -> int:
    return main(0.0, ["index", "--config", "index.yaml", f"data={{target: '{HERE}:{target}'}}", *words])


def read(path: str) -> Any:
    return build_dataset(parse_config(f"data: {{kind: parquet, path: {path}}}").data)


def check_equal(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
        assert np.asarray(found[name]).dtype == np.asarray(value).dtype, name


def test_samples_come_back_with_their_types(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(write_shards, "_GROUPS_PER_SHARD", 1)
    assert index("Stream", "--out", "shards") == 0
    assert "2,500 samples" in (said := capsys.readouterr().out)
    assert "data: {kind: parquet, path: shards}" in said
    dataset = read("shards")
    assert len(dataset.blocks) == 3
    for place, sample in enumerate(Stream()):
        if place % 100 == 0 or place == 2499:
            check_equal(dataset[place], sample)
    assert index("pairs", "--out", "tuples") == 0
    inputs, label = read("tuples")[7]
    assert (inputs.tolist(), inputs.dtype, label) == ([7.0, 7.0, 7.0], np.float32, 7)


def failing(samples: Iterable[Any], after: int) -> Iterator[Any]:
    yield from itertools.islice(samples, after)
    raise OSError("no answer")


def test_the_same_command_goes_on_after_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_shards, "_GROUPS_PER_SHARD", 1)
    partial = tmp_path / "shards.partial"
    with pytest.raises(OSError, match="no answer") as raised:
        write_shards.write_shards(failing(Stream(), 1700), partial)
    assert raised.value.__notes__ == ["while reading sample 1700 of the stream"]
    assert [path.name for path in partial.glob("*.parquet")] == ["000000.parquet"]
    assert index("Stream", "--out", "shards") == 0
    assert not partial.exists()
    dataset = read("shards")
    assert [int(dataset[place]["label"]) for place in range(2500)] == [sample["label"] for sample in Stream()]


@pytest.mark.parametrize(
    ("samples", "sentence"),
    [
        ([{"a": 1}, {"b": 1}], "a sample has the values b, and the first one a"),
        ([{"a": 1}, {"a": 1, "b": 2}], "a sample has the values a, b"),
        ([(1, 2), (1, 2, 3)], "a sample has the values 0, 1, 2"),
        ([{"a": None}], "None in the first 1 samples"),
        ([{"a": np.zeros((2, 2), bool)}], "make it uint8"),
        ([{"a": object()}], "a of a sample cannot be stored"),
        ([{"a": np.zeros((2, 2))}, {"a": np.zeros((3, 2))}], "same shape"),
        ([torch.zeros(2)], "gives a Tensor; index takes mappings and tuples"),
        ([], "the stream has no samples"),
    ],
)
def test_samples_that_cannot_be_stored_are_named(tmp_path: Path, samples: list[Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        write_shards.write_shards(samples, tmp_path / "partial")
    assert not list(tmp_path.glob("partial/*.parquet"))


@pytest.mark.parametrize("lost", ["", "PAR1", None])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_shards_that_a_loss_of_power_has_spoiled_are_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, lost: str | None
) -> None:
    monkeypatch.setattr(write_shards, "_GROUPS_PER_SHARD", 1)
    assert index("Stream", "--out", "whole") == 0
    assert index("Stream", "--out", "again") == 0
    partial = (tmp_path / "again").rename(tmp_path / "again.partial")
    shard = partial / f"{number:06d}.parquet"
    shard.unlink() if lost is None else shard.write_text(lost)
    done: list[str] = []
    link = "/proc/self/fd/{}".format
    monkeypatch.setattr("os.fsync", lambda descriptor: done.append(Path(os.readlink(link(descriptor))).name))
    assert index("Stream", "--out", "again") == 0
    assert shard.with_suffix(".unfinished").name in done
    assert done[-1] == tmp_path.name, "the folder that has the shards' folder"
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == names
    found, expected = read("again"), read("whole")
    assert [found[place]["label"] for place in range(len(found))] == [
        expected[place]["label"] for place in range(len(expected))
    ]


def test_a_stream_that_differs_in_one_sample_is_refused(tmp_path: Path) -> None:
    """As one that is shuffled, and its shards may begin alike."""
    samples = [{"a": number} for number in range(3000)]
    write_shards.write_shards(samples, tmp_path / "partial")
    samples[1500], samples[1501] = samples[1501], samples[1500]
    with pytest.raises(DataError, match="the samples from number 0 on are others than when"):
        write_shards.write_shards(samples, tmp_path / "partial")


def test_all_shards_have_the_columns_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_shards, "_GROUPS_PER_SHARD", 1)
    with pytest.raises(DataError, match=r"a of a sample cannot be stored: .*1\.5"):
        write_shards.write_shards(({"a": 1 if number < 1000 else 1.5} for number in range(1001)), tmp_path / "shards")


def test_other_kinds_and_existing_folders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(0.0, ["index", "--config", str(tmp_path / "index.yaml"), "--out", "shards"]) == 2
    assert "index reads a stream of data.target, not data.kind=text" in capsys.readouterr().err
    (tmp_path / "shards").mkdir()
    assert index("Stream", "--out", "shards") == 2
    assert "already exists" in capsys.readouterr().err
    assert index("Stream") == 2
    assert "--out FOLDER is missing" in capsys.readouterr().err
