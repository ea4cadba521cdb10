"""What a resume takes for the same data: samples all over the dataset, or only length and layout."""

import hashlib
import os
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from steadfast.data.batches import stack, tensors_of
from steadfast.data.datasets import TextDataset
from steadfast.data.fingerprint import LAYOUT, fingerprint, is_same_data


class Samples:
    """`length` samples, each a call with its index."""

    def __init__(self, sample: Callable[[int], Any], length: int = 64) -> None:
        self._sample, self._length = sample, length
        self.num_reads = 0

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int, /) -> Any:
        self.num_reads += 1
        return self._sample(index)


def former(dataset: Any) -> str:
    """The fingerprint of a former version."""
    digest = hashlib.sha256(f"{len(dataset)}{getattr(dataset, 'digest', '')}".encode())
    for index in (0, len(dataset) - 1):
        for tensor in tensors_of(stack([dataset[index]])):
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def own_generator() -> Samples:
    """As albumentations does."""
    rng = np.random.default_rng()
    return Samples(lambda index: (torch.full((3,), float(index)) * float(rng.uniform()), index))


def crops_of_any_size() -> Samples:
    own = random.Random()
    return Samples(lambda index: {"image": torch.full((3, own.randint(1, 1000)), index), "name": f"{index}.png"})


def unseeded_torch() -> Samples:
    generator = torch.Generator()
    generator.seed()
    return Samples(lambda index: torch.rand(2, generator=generator))


def from_the_system() -> Samples:
    return Samples(lambda _: list(os.urandom(8)))


def a_counter() -> Samples:
    """Other numbers in each reading, the same in each process; a former version took them for content."""
    numbers = iter(range(10**6))
    return Samples(lambda index: (torch.tensor(next(numbers)), index))


@pytest.mark.parametrize("build", [own_generator, crops_of_any_size, unseeded_torch, from_the_system, a_counter])
def test_a_dataset_that_nothing_seeds_is_known_by_length_and_layout(build: Callable[[], Samples]) -> None:
    found = fingerprint(build())
    assert found.startswith(LAYOUT)
    assert fingerprint(build()) == found, "so that another process resumes the run"
    assert is_same_data("0123456789abcdef", found), "what a former version has read once says nothing"
    longer = build()
    longer._length += 1
    assert fingerprint(longer) != found
    assert not is_same_data(found, fingerprint(Samples(lambda index: torch.zeros(2, 2) + torch.rand(1) * index)))


def test_layouts_differ_in_types_and_shapes() -> None:
    rng = np.random.default_rng()

    def drawing(dtype: str, *shape: int) -> Samples:
        return Samples(lambda _: rng.uniform(size=shape).astype(dtype))

    kinds = [drawing("f8", 2), drawing("f8", 3), drawing("f8", 2, 2), drawing("f4", 2)]
    assert len(set(map(fingerprint, kinds))) == 4


def drawn(index: int) -> Any:
    """Seeded by whoever reads the sample."""
    return torch.rand(2) + index, float(np.random.rand()), random.random()


SAMPLES: dict[str, Callable[[int], Any]] = {
    "tensors": lambda index: (torch.arange(3.0) + index, index % 2),
    "arrays in a mapping": lambda index: {"x": np.full((2, 2), index, np.int16), "y": index},
    "seeded draws": drawn,
    "texts": lambda index: {"text": f"sample {index}", "label": index % 2},
    "bytes": lambda index: (b"%d" % index, 1),
    "images": lambda index: (Image.new("RGB", (4, 4), (index, 0, 0)), 1),
    "a few that nobody can read": lambda index: [1, 2][index] if 20 < index < 40 else torch.tensor(index),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_data_that_change_between_the_first_and_the_last_sample_are_other_data(name: str) -> None:
    sample = SAMPLES[name]
    found = fingerprint(Samples(sample))
    assert not found.startswith(LAYOUT)
    assert is_same_data(found, fingerprint(Samples(sample)))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name != "seeded draws":
            assert is_same_data(former(Samples(sample)), found), "a run of a former version goes on"
    # The middle has the samples that were there, in another order.
    changed = Samples(lambda index: sample(63 - index) if 0 < index < 63 else sample(index))
    assert not is_same_data(found, fingerprint(changed))
    assert not is_same_data(found, fingerprint(Samples(sample, 63)))


def test_a_mixture_is_known_by_all_of_its_sources() -> None:
    def mixture(*lengths: int, middle: int = 0) -> Any:
        middles = [Samples(lambda index: torch.tensor(middle if index % 63 else index), length) for length in lengths]
        return SimpleNamespace(sources=[TensorDataset(torch.arange(9.0)), *middles])

    found = fingerprint(mixture(64, 64))
    assert found.startswith(hashlib.sha256(" ".join(map(former, mixture(64, 64).sources)).encode()).hexdigest()[:16])
    assert found not in {fingerprint(mixture(64, 64, middle=1)), fingerprint(mixture(64, 127))}
    assert fingerprint(SimpleNamespace(sources=[own_generator()])).startswith(LAYOUT)


def test_a_text_may_move_but_not_change(tmp_path: Any) -> None:
    marks = []
    for name, middle in [("a", b"b"), ("moved", b"b"), ("changed", b"c")]:
        (tmp_path / name).write_bytes(b"a" * 500 + middle * 500 + b"a" * 500)
        marks.append(fingerprint(TextDataset(str(tmp_path / name), 8)))
    assert marks[0] == marks[1] != marks[2]


@pytest.mark.parametrize(("sample_s", "is_augmented", "most"), [(0.0, True, 24), (0.05, True, 18), (0.05, False, 12)])
def test_samples_that_take_long_are_not_all_read_twice(
    monkeypatch: pytest.MonkeyPatch, sample_s: float, is_augmented: bool, most: int
) -> None:
    now_s = 0.0

    def sample(index: int) -> torch.Tensor:
        nonlocal now_s
        now_s += sample_s
        return torch.tensor(index)

    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    dataset = Samples(sample, 10**6)
    dataset.is_augmented = is_augmented  # type: ignore[attr-defined]
    fingerprint(dataset)
    assert most - 2 <= dataset.num_reads <= most


def test_shards_are_known_by_their_index_and_two_samples() -> None:
    dataset = Samples(torch.tensor)
    dataset.digest = "of the index"  # type: ignore[attr-defined]
    assert fingerprint(dataset).startswith(former(dataset))
    assert dataset.num_reads == 6  # two samples twice, and those of `former`
