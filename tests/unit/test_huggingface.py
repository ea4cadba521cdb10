"""`data: {kind: huggingface}`, on real datasets that were saved to disk. Names of the hub are not tried: no network."""

import pickle
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from steadfast.config import HuggingFaceData, ValidationHuggingFace
from steadfast.data.datasets import build_dataset
from steadfast.data.loader import Loader
from steadfast.data.order import SampleOrder
from steadfast.errors import ConfigError, DataError
from tests.support.loading import CPU, microbatches

ROWS = {"tokens": [[index, index + 1] for index in range(10)], "label": list(range(10)), "text": ["word"] * 10}


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """A folder with the splits train, of ten rows, and test, of three."""
    train = datasets.Dataset.from_dict(ROWS)
    datasets.DatasetDict({"train": train, "test": train.select(range(3))}).save_to_disk(tmp_path / "both")
    return str(tmp_path / "both")


def test_a_sample_is_a_mapping_of_its_columns(saved: str) -> None:
    dataset: Any = build_dataset(HuggingFaceData(path=saved))
    assert len(dataset) == 10
    sample = dataset[3]
    assert sample["text"] == "word"
    assert sample["tokens"].tolist() == [3, 4]
    assert sample["label"].dtype == torch.int64
    few: Any = build_dataset(HuggingFaceData(path=saved, split="test", columns=("label", "tokens")))
    assert len(few) == 3
    assert set(pickle.loads(pickle.dumps(few))[0]) == {"label", "tokens"}


def test_mappings_go_through_the_loader_with_another_split_to_validate_on(saved: str) -> None:
    config = HuggingFaceData(path=saved, validation=ValidationHuggingFace(path=saved, split="test"))
    dataset = build_dataset(config)
    loader = Loader(dataset, SampleOrder(10, 0.0, 1), config, CPU)
    (fetched,) = loader.steps(microbatches(0, 8))
    assert fetched.batch["tokens"].shape == (8, 2)
    assert torch.equal(fetched.batch["tokens"][:, 0], fetched.batch["label"])
    assert loader.num_validation == 3


def test_a_folder_of_files_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.csv").write_text("x,y\n1,2\n3,4\n")
    dataset: Any = build_dataset(HuggingFaceData(path=str(tmp_path / "files")))
    assert dataset[1]["y"] == 4


def test_what_is_not_there_is_named(saved: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no split dev; there are: train, test"):
        build_dataset(HuggingFaceData(path=saved, split="dev"))
    with pytest.raises(DataError, match=r"cannot be read: .*'labels'.* not in the dataset"):
        build_dataset(HuggingFaceData(path=saved, columns=("labels",)))
    datasets.Dataset.from_dict(ROWS, split="train").save_to_disk(tmp_path / "one")
    assert len(build_dataset(HuggingFaceData(path=str(tmp_path / "one")))) == 10
    with pytest.raises(DataError, match="holds the split train alone, not test"):
        build_dataset(HuggingFaceData(path=str(tmp_path / "one"), split="test"))


def test_without_the_package_one_error_names_what_to_install(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"data.kind: needs datasets: pip install 'steadfast\[huggingface\]' \("):
        build_dataset(HuggingFaceData(path=saved))
