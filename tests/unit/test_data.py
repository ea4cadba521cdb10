from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.config import TargetData, TextData, TokensData
from app.config.target import load_target
from app.data.datasets import TextDataset, TokensDataset, build_dataset
from app.data.loader import Loader
from app.data.order import SampleOrder, samples_digest
from app.errors import ConfigError, DataError
from app.plan import Microbatch

CPU = torch.device("cpu")


class Noisy:
    """Fifty samples with augmentation from all three generators that user code draws from."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return torch.tensor([float(index), torch.rand(()), random.random(), np.random.rand()]), index


class Odd(Noisy):
    """Sample 7 is of another shape, or whatever else is asked for."""

    def __init__(self, odd: Any, sample: int = 7) -> None:
        self.odd = odd
        self.sample = sample

    def __getitem__(self, index: int) -> Any:
        return self.odd if index == self.sample else (torch.zeros(2), index)


def microbatches(start: int, stop: int, size: int = 8) -> Iterator[Microbatch]:
    edges = [*range(start, stop, size), stop]
    return iter([Microbatch(0, index, a, b, 1) for index, (a, b) in enumerate(pairwise(edges))])


def loader_of(
    dataset: Any, num_workers: int = 0, validation_fraction: float = 0.1, seed: int = 1, **fields: Any
) -> Loader:
    config = TargetData(target="a:b", num_workers=num_workers, **fields)
    return Loader(dataset, SampleOrder(len(dataset), validation_fraction, seed), config, seed, CPU)


# datasets


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


def test_unusable_data_say_what_was_seen_and_needed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    builders: dict[str, Callable[[], object]] = {
        "matches no file": lambda: TextDataset(f"{tmp_path}/none*", 4),
        "holds 5 tokens; context_length 5 needs 6": lambda: TextDataset(str(path), 5),
        "cannot be read as uint16: .* not a multiple": lambda: TokensDataset(str(path), "uint16", 2),
        "No such file": lambda: TokensDataset(str(tmp_path / "y"), "uint16", 2),
        "list gave a dataset of 0 samples": lambda: build_dataset(TargetData(target="builtins:list")),
        "int, which lacks __len__ or __getitem__": lambda: build_dataset(TargetData(target="builtins:int")),
    }
    for message, build in builders.items():
        with pytest.raises(DataError, match=message):
            build()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("jason:loads", "no module jason in "),
        ("json.deep:loads", "no module json.deep in "),
        ("json:load_", "json has no load_"),
        ("math:pi", "is a float, which cannot be called"),
    ],
)
def test_target_says_what_failed(target: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_target(target, "data.target")
    assert message in str(caught.value)
    assert str(caught.value).startswith("data.target: ")


def test_target_is_found_in_the_working_directory_and_a_failing_import_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_b.py").write_text("def dataset(n): return [(float(i),) for i in range(n)]\n")
    (tmp_path / "needs_b.py").write_text("import not_installed_b\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in __import__("sys").path if path])
    assert len(build_dataset(TargetData(target="mine_b:dataset", args={"n": 3}))) == 3
    with pytest.raises(ConfigError, match=r"data\.args: .* does not take .*'m'"):
        build_dataset(TargetData(target="mine_b:dataset", args={"m": 3}))
    with pytest.raises(ConfigError, match="no module not_installed_b in"):
        load_target("needs_b:x")


# loader


def test_fetched_is_the_ordered_samples_with_their_digest() -> None:
    dataset = TextDataset("python-docs", 32)
    order = SampleOrder(len(dataset), 0.1, 1)
    loader = Loader(dataset, order, TextData(context_length=32), 1, CPU)
    for which, fetch in ((order.train, loader.steps), (order.validation, loader.validation)):
        for fetched in fetch(microbatches(3000, 3050)):
            positions = np.arange(fetched.microbatch.start, fetched.microbatch.stop)
            ids = which(positions)
            inputs, targets = fetched.batch
            assert torch.equal(inputs, torch.stack([dataset[i][0] for i in ids.tolist()]))
            assert torch.equal(targets, torch.stack([dataset[i][1] for i in ids.tolist()]))
            assert fetched.num_samples == len(ids)
            assert fetched.digest == samples_digest(ids, positions, 1)


def test_pads_count_for_nothing_and_may_look_back() -> None:
    loader = loader_of(Noisy())
    there = next(loader.steps(microbatches(0, 1)))
    far = Microbatch(9, 0, 5000, 5008, 1)
    pad = Microbatch(9, 1, 0, 1, 0)
    _, fetched, again = loader.steps(iter([far, pad, far]))
    assert (fetched.num_samples, fetched.digest) == (0, 0)
    assert torch.equal(fetched.batch[0], there.batch[0])
    assert again.digest


def test_randomness_follows_the_sample_and_leaves_the_loop_alone() -> None:
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    undisturbed = torch.rand(()), random.random(), np.random.rand()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    whole = torch.cat([fetched.batch[0] for fetched in loader_of(Noisy()).steps(microbatches(0, 40))])
    assert (torch.rand(()), random.random(), np.random.rand()) == undisturbed

    parts = torch.cat([fetched.batch[0] for fetched in loader_of(Noisy()).steps(microbatches(13, 40, 5))])
    assert torch.equal(whole[13:], parts)
    second_epoch = torch.cat([fetched.batch[0] for fetched in loader_of(Noisy()).steps(microbatches(45, 90))])
    assert not set(second_epoch[:, 1].tolist()) & set(whole[:, 1].tolist())


def test_the_stream_is_read_lazily() -> None:
    read = []

    def stream() -> Iterator[Microbatch]:
        for microbatch in microbatches(0, 10**6):
            read.append(microbatch.index)
            yield microbatch

    fetched = loader_of(Noisy()).steps(stream())
    next(fetched), next(fetched)
    assert read == [0, 1]


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (
            (torch.zeros(3), 7),
            r"sample 7 is \(float32 \(3,\), int \(\)\), expected \(float32 \(2,\), int \(\)\)",
        ),
        ((torch.zeros(2), 7.5), r"sample 7 is \(float32 \(2,\), float \(\)\), expected"),
        ((torch.zeros(2),), r"sample 7 is \(float32 \(2,\)\), expected"),
        ((torch.zeros(2), "cat"), r"sample 7 is \(float32 \(2,\), str \(\)\), expected"),
        (torch.zeros(2), r"sample 7 is \(\), expected"),
    ],
)
@pytest.mark.parametrize("size", [1, 8])
def test_odd_sample_is_named_with_its_shape(odd: Any, message: str, size: int) -> None:
    with pytest.raises(DataError, match=message):
        list(loader_of(Odd(odd), validation_fraction=0.0).steps(microbatches(0, 50, size)))


@pytest.mark.parametrize("samples", [[torch.zeros(2)] * 9, [{"x": 1}] * 9, [("cat",)] * 9])
def test_samples_that_are_no_tuples_of_numbers_are_told(samples: list[Any]) -> None:
    with pytest.raises(DataError, match=r"sample \d is .*, expected a tuple of tensors"):
        next(loader_of(samples).steps(microbatches(0, 8)))
