"""Datasets: text, tokens, and what a target may return."""

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steadfast.config import TargetData, TextData, TokensData
from steadfast.data.datasets import TextDataset, TokensDataset, build_dataset
from steadfast.errors import DataError
from tests.support.loading import Noisy


@pytest.mark.parametrize("source", ["corpus.txt", "*.txt"])
def test_data_lie_in_the_working_directory_or_where_runs_do(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, here = tmp_path / "shared", tmp_path / "here"
    for folder in (shared, here):
        folder.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr("steadfast.run.directory._SHARED", shared)
    with pytest.raises(DataError, match=f"matches no file in {here} or {shared}"):
        build_dataset(TextData(source=source, context_length=4))
    (shared / "corpus.txt").write_bytes(b"s" * 100)
    (shared / "corpus.bin").write_bytes(b"s" * 100)
    assert build_dataset(TextData(source=source, context_length=4))[0][0].unique().tolist() == [ord("s")]
    assert build_dataset(TokensData(path="corpus.bin", dtype="uint8", context_length=4))[0][0].tolist() == 4 * [115]
    (here / "corpus.txt").write_bytes(b"h" * 100)
    assert build_dataset(TextData(source=source, context_length=4))[0][0].unique().tolist() == [ord("h")]


def test_text_windows_cover_the_text_and_overlap_by_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"01234")
    (tmp_path / "b.txt").write_bytes(b"56789abc")
    dataset = TextDataset(f"{tmp_path}/*.txt", 4)
    text = b"01234\n\n56789abc"
    assert len(dataset) == (len(text) - 1) // 4 == 3
    inputs, targets = dataset[1]
    assert inputs.dtype == targets.dtype == torch.int64
    assert bytes(inputs.tolist()) == text[4:8]
    assert bytes(targets.tolist()) == text[5:9]
    assert dataset.units_per_sample == 4


def test_python_docs_need_no_download() -> None:
    assert len(build_dataset(TextData())) > 1000


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_tokens_are_mapped_and_pickle_without_the_file(tmp_path: Path, dtype: type) -> None:
    path = tmp_path / "tokens.bin"
    np.arange(100, dtype=dtype).tofile(path)
    dataset: Any = build_dataset(TokensData(kind="tokens", path=str(path), dtype=dtype, context_length=9))
    assert dataset[1][0].tolist() == list(range(9, 18))
    assert isinstance(dataset.tokens, np.memmap)
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 400
    assert pickle.loads(pickled)[10][1].tolist() == list(range(91, 100))


class OfHalfASample(list[int]):
    def __len__(self) -> Any:
        return 0.5


def test_unusable_data_say_what_was_seen_and_needed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    builders: dict[str, Callable[[], object]] = {
        "matches no file": lambda: TextDataset(f"{tmp_path}/none*", 4),
        "holds 5 tokens; context_length 5 needs 6": lambda: TextDataset(str(path), 5),
        "cannot be read as uint16: .* not a multiple": lambda: TokensDataset(str(path), "uint16", 2),
        "No such file": lambda: TokensDataset(str(tmp_path / "y"), "uint16", 2),
        "list returned a dataset of 0 samples": lambda: build_dataset(TargetData(target="builtins:list")),
        "int, which lacks __len__ or __getitem__": lambda: build_dataset(TargetData(target="builtins:int")),
        "OfHalfASample, whose length cannot be read: 'float' object": lambda: build_dataset(
            TargetData(target="tests.unit.test_datasets:OfHalfASample")
        ),
    }
    for message, build in builders.items():
        with pytest.raises(DataError, match=message):
            build()


class Sampled(Noisy):
    def __init__(self, sampler: Any = None, batch_sampler: Any = None) -> None:
        self.sampler = sampler
        self.batch_sampler = batch_sampler


@pytest.mark.parametrize("attribute", ["sampler", "batch_sampler"])
def test_a_dataset_with_a_sampler_is_refused_as_nothing_would_ask_it(attribute: str) -> None:
    assert len(build_dataset(TargetData(target="tests.unit.test_datasets:Sampled"))) == 50
    target = TargetData(target="tests.unit.test_datasets:Sampled", args={attribute: [3, 1]})
    with pytest.raises(DataError, match=rf"returned a Sampled with a {attribute}, .* as data\.order"):
        build_dataset(target)


def test_a_data_loader_is_refused_as_a_dataset() -> None:
    target = TargetData(target="torch.utils.data:DataLoader", args={"dataset": [1, 2], "batch_size": 2})
    with pytest.raises(DataError, match=r"returned a DataLoader, .* Return its dataset, and configure data\.order"):
        build_dataset(target)


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


def test_a_stream_is_refused_by_its_name() -> None:
    command = "`steadfast index --config FILE --out FOLDER"
    with pytest.raises(DataError, match=f"a Stream, an IterableDataset: .* {command}.* or return a map-style dataset"):
        build_dataset(TargetData(target="tests.unit.test_datasets:Stream"))
