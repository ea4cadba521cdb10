"""Batches of samples: stacked or collated, the same wherever they are read, and the message for an odd sample."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from steadfast.config import HeldOut, LoaderConfig, Target, TargetData, TextData, ValidationTarget
from steadfast.data.datasets import TextDataset
from steadfast.data.loader import Loader, num_loader_processes
from steadfast.data.order import SampleOrder, build_order
from steadfast.errors import DataError, described
from steadfast.plan import Microbatch
from tests.support.loading import CPU, Noisy, Odd, loader_of, microbatches
from tests.support.orders import samples_digest


def test_fetched_is_the_ordered_samples_with_their_digest() -> None:
    dataset = TextDataset("python-docs", 32)
    order = SampleOrder(len(dataset), 0.1, 1)
    loader = Loader(dataset, order, TextData(context_length=32), CPU)
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


def test_what_a_fetch_ahead_finds_is_given_and_raised_in_its_turn() -> None:
    loader = loader_of(Noisy())
    loader.fetch_ahead()  # before any step
    expected = list(loader.steps(microbatches(0, 3)))
    batches = loader.steps(microbatches(0, 3))
    given = []
    for _ in expected:
        loader.fetch_ahead()
        loader.fetch_ahead()  # of one microbatch at most
        given.append(next(batches))
    assert [fetched.digest for fetched in given] == [fetched.digest for fetched in expected]
    loader.fetch_ahead()
    assert next(batches, None) is None

    def broken() -> Iterator[Microbatch]:
        yield Microbatch(1, 0, 0, 1, 1)
        raise DataError("sample 1 is broken")

    batches = loader.steps(broken())
    next(batches)
    loader.fetch_ahead()  # during the step before: it is not this step's error
    with pytest.raises(DataError, match="sample 1 is broken"):
        next(batches)


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
        (torch.zeros(2), r"sample 7 is \(float32 \(2,\)\), expected"),
        ({"x": 7}, r"sample 7 is \(x: int \(\)\), expected .* name a function that pads the samples as data.collate"),
    ],
)
@pytest.mark.parametrize("size", [1, 8])
def test_odd_sample_is_named_with_its_shape(odd: Any, message: str, size: int) -> None:
    with pytest.raises(DataError, match=message):
        list(loader_of(Odd(odd), validation_fraction=0.0).steps(microbatches(0, 50, size)))


class Broken(Noisy):
    """Sample 7 cannot be read, one by one or in batches of its own."""

    is_augmented = False

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise self.error
        return (torch.zeros(2), index)


class BrokenBatches(Broken):
    def read_batch(self, ids: Any) -> Any:
        return torch.stack([self[index][0] for index in ids])


class BrokenSeveral(Broken):
    def __getitems__(self, ids: list[int]) -> list[Any]:
        return [self[index] for index in ids]


def refuse_seven(samples: list[Any]) -> Any:
    if 7 in [index for _, index in samples]:
        raise ValueError("bad mixup")
    return torch.zeros(len(samples))


REFUSE_SEVEN = Target(target="tests.unit.test_loader:refuse_seven")


@pytest.mark.parametrize(
    ("dataset", "fields", "note"),
    [
        (Broken(ValueError("no image")), {}, "while reading sample 7 (epoch 1)"),
        (Broken(SystemExit("no image")), {}, "while reading sample 7 (epoch 1)"),
        (BrokenBatches(KeyError("no image")), {}, "while reading samples 4-7 (epoch 1)"),
        (BrokenSeveral(OSError("no image")), {}, "while reading samples 4-7 (epoch 1)"),
        (Noisy(), {"collate": REFUSE_SEVEN}, "while reading samples 4-7 (epoch 1)"),
    ],
)
def test_an_exception_names_the_samples(dataset: Any, fields: dict[str, Any], note: str) -> None:
    loader = loader_of(dataset, validation_fraction=0.0, order="sequential", **fields)
    with pytest.raises(Exception, match=r"no image|bad mixup") as raised:
        list(loader.steps(microbatches(0, 8, 4)))
    assert raised.value.__notes__ == [note]
    assert described(raised.value).endswith(f"; {note}")


def test_batch_without_room_in_shared_memory_names_a_remedy() -> None:
    error = RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")
    loader = loader_of(Broken(error), validation_fraction=0.0, order="sequential")
    with pytest.raises(DataError, match=r"/dev/shm had no room .* while reading sample 7 \(epoch 1\): enlarge it"):
        list(loader.steps(microbatches(0, 8, 4)))


def test_a_validation_sample_and_a_later_epoch_are_named_as_such() -> None:
    loader = loader_of(Broken(ValueError("no image")), order="sequential", validation_fraction=0.0)
    with pytest.raises(ValueError, match="no image") as raised:
        list(loader.steps(microbatches(57, 58)))
    assert raised.value.__notes__ == ["while reading sample 7 (epoch 2)"]
    config = TargetData(target="a:b", order="sequential", validation=ValidationTarget(target="a:b"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("steadfast.data.datasets.build_target", lambda *_: Broken(ValueError("no image")))
        loader = Loader(Noisy(), SampleOrder(50, 0.0, 1), config, CPU)
    with pytest.raises(ValueError, match="no image") as raised:
        list(loader.validation(microbatches(0, 50, 50)))
    assert raised.value.__notes__ == ["while reading validation sample 7 (epoch 1)"]


class Tokens(Noisy):
    """Sample 7 has a token 300, as an input or as a target."""

    is_augmented = False

    def __init__(self, odd: dict[str, int], named: bool) -> None:
        self.odd, self.named = odd, named

    def __getitem__(self, index: int) -> Any:
        inputs, targets = torch.full((4,), 255), torch.tensor([255, 1, -100, 2])
        if index == 7:
            inputs[1], targets[1] = self.odd.get("inputs", 0), self.odd.get("targets", 0)
        return {"input_ids": inputs, "labels": targets} if self.named else (inputs, targets)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(("odd", "token"), [({"inputs": 300}, 300), ({"targets": 256}, 256), ({"inputs": -1}, -1)])
def test_a_token_beyond_the_vocabulary_is_refused_with_its_sample(named: bool, odd: dict[str, int], token: int) -> None:
    config = TargetData(target="a:b", order="sequential", validation_fraction=0.0)
    data = Tokens(odd, named)
    loader = Loader(data, build_order(config, 50, 1), config, CPU, vocab_size=256)
    fetched = loader.steps(microbatches(0, 8, 4))
    next(fetched)
    with pytest.raises(DataError, match=rf"^token {token} in sample 7, but model.vocab_size is 256: "):
        next(fetched)
    assert len(list(Loader(data, build_order(config, 50, 1), config, CPU).steps(microbatches(0, 8, 4)))) == 2


@pytest.mark.parametrize("sample", ["cat", ("cat",), {"name": "cat"}, None])
def test_samples_without_numbers_are_told(sample: Any) -> None:
    with pytest.raises(DataError, match=r"sample \d is .*, expected tensors, arrays or numbers"):
        next(loader_of([sample] * 9).steps(microbatches(0, 8)))


class Point(NamedTuple):
    x: float
    y: int


@dataclass
class Pair:
    first: Any
    second: Any


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (torch.arange(2), "tensor(3, 2) int64"),
        ((np.zeros(2, np.float64), 1), "(tensor(3, 2) float32, tensor(3) int64)"),
        ([torch.zeros(2), 1], "[tensor(3, 2) float32, tensor(3) int64]"),
        ({"ids": [1, 2, 3], "name": "cat"}, "{ids: tensor(3, 3) int64, name: [cat, cat, cat]}"),
        (Point(0.5, 1), "Point(tensor(3) float32, tensor(3) int64)"),
        (Pair({"a": 1}, (2.0,)), "Pair({a: tensor(3) int64}, (tensor(3) float32))"),
        ((np.int64(4), np.float32(1)), "(tensor(3) int64, tensor(3) float32)"),
    ],
)
def test_samples_of_any_shape_are_stacked_in_their_containers(sample: Any, expected: str) -> None:
    """What is floating point comes in the format of the model's parameters."""
    loader = loader_of([sample] * 9, validation_fraction=0.0)
    (fetched,) = loader.steps(microbatches(0, 3, 3))
    assert in_words(fetched.batch) == expected
    assert in_words(loader.example(3)) == expected


def in_words(batch: Any) -> str:
    if isinstance(batch, torch.Tensor):
        return f"tensor({', '.join(map(str, batch.shape))}) {str(batch.dtype).removeprefix('torch.')}"
    if isinstance(batch, dict):
        return "{" + ", ".join(f"{key}: {in_words(value)}" for key, value in batch.items()) + "}"
    if isinstance(batch, Pair):
        return f"Pair({in_words(batch.first)}, {in_words(batch.second)})"
    if isinstance(batch, list):
        return f"[{', '.join(map(in_words, batch))}]"
    if isinstance(batch, tuple):
        name = "Point" if isinstance(batch, Point) else ""
        return f"{name}({', '.join(map(in_words, batch))})"
    return str(batch)


def pad(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    longest = max(map(len, samples))
    rows = [torch.nn.functional.pad(sample, (0, longest - len(sample))) for sample in samples]
    return {"ids": torch.stack(rows), "noise": torch.rand(2)}


class Pad:
    def __init__(self, to: int) -> None:
        self._to = to

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([torch.nn.functional.pad(sample, (0, self._to - len(sample))) for sample in samples])


def ragged(num: int) -> list[torch.Tensor]:
    return [torch.arange(1 + index % 5) for index in range(num)]


def loader_with(collate: Target) -> Loader:
    return loader_of(ragged(40), validation_fraction=0.0, collate=collate)


def test_a_function_of_the_users_makes_batches_of_ragged_samples_and_draws_the_same_wherever_it_runs() -> None:
    collate = Target(target="tests.unit.test_loader:pad")
    whole = [fetched.batch for fetched in loader_with(collate).steps(microbatches(0, 40, 4))]
    assert {batch["ids"].shape[0] for batch in whole} == {4}
    part = next(loader_with(collate).steps(microbatches(36, 40, 4))).batch
    assert torch.equal(part["ids"], whole[-1]["ids"])
    assert torch.equal(part["noise"], whole[-1]["noise"])
    assert not torch.equal(whole[0]["noise"], whole[1]["noise"])
    with_arguments = Target(target="tests.unit.test_loader:Pad", args={"to": 9})
    assert next(loader_with(with_arguments).steps(microbatches(0, 4, 4))).batch.shape == (4, 9)


def doubled(samples: list[torch.Tensor]) -> torch.Tensor:
    """Stands for mixup: a batch for training alone."""
    return 2 * torch.stack([torch.as_tensor(sample) for sample in samples])


def negative(samples: list[torch.Tensor]) -> torch.Tensor:
    return -torch.stack([torch.as_tensor(sample) for sample in samples])


DOUBLED = Target(target="tests.unit.test_loader:doubled")
NEGATIVE = Target(target="tests.unit.test_loader:negative")


@pytest.mark.parametrize(
    ("validation", "expected"),
    [
        (None, [8, 9]),
        (HeldOut(collate=NEGATIVE), [-8, -9]),
        (ValidationTarget(target="tests.unit.test_loader:numbers"), [100, 101]),
    ],
)
def test_collate_is_for_training_and_validation_has_its_own(validation: Any, expected: list[int]) -> None:
    config = TargetData(
        target="a:b", order="sequential", validation_fraction=0.2, collate=DOUBLED, validation=validation
    )
    loader = Loader(range(10), build_order(config, 10, 1), config, CPU)
    loader.check_validation(4)
    assert next(loader.steps(microbatches(0, 2))).batch.tolist() == [0, 2]
    assert next(loader.validation(microbatches(0, 2))).batch.tolist() == expected
    assert loader.num_validation == 2
    assert config.held_out_fraction == (0 if isinstance(validation, ValidationTarget) else 0.2)


def numbers() -> list[int]:
    return [100, 101]


def test_validation_samples_that_cannot_be_stacked_are_told_at_the_start() -> None:
    collate = Target(target="tests.unit.test_loader:pad")
    config = TargetData(target="a:b", collate=collate, validation_fraction=0.5)
    loader = Loader(ragged(40), SampleOrder(40, 0.5, 1), config, CPU)
    missing = r"data\.validation\.collate is missing, and data\.collate is for training only"
    for size in (1, 4):
        with pytest.raises(DataError, match=rf"^{missing}: sample \d+ is .* as data\.validation\.collate"):
            loader.check_validation(size)
    same = [torch.arange(3)] * 40
    with pytest.raises(DataError, match=rf"^{missing}: .* lack ids, noise, which training batches have"):
        Loader(same, SampleOrder(40, 0.5, 1), config, CPU).check_validation(4)
    given = config.model_copy(update={"validation": HeldOut(collate=collate)})
    loader = Loader(ragged(40), SampleOrder(40, 0.5, 1), given, CPU)
    loader.check_validation(4)
    assert set(next(loader.validation(microbatches(0, 4))).batch) == {"ids", "noise"}


def test_a_dataset_that_makes_batches_itself_takes_no_collate_function() -> None:
    class Batches(Noisy):
        def read_batch(self, ids: Any) -> Any:
            return torch.from_numpy(ids)

    with pytest.raises(DataError, match=r"data\.collate: Batches\.read_batch makes the batches"):
        loader_of(Batches(), collate=DOUBLED)
    with pytest.raises(DataError, match=r"data\.validation\.collate: Batches\.read_batch makes the batches"):
        loader_of(Batches(), validation=HeldOut(collate=DOUBLED))


class Epochs:
    """Samples that are (index, epoch), as a dataset with a curriculum has them."""

    epoch = -1

    def __len__(self) -> int:
        return 10

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, self.epoch


def test_a_dataset_with_epochs_is_told_them_by_the_position_of_each_sample() -> None:
    loader = loader_of(Epochs(), validation_fraction=0.2)
    found = [fetched.batch[1].tolist() for fetched in loader.steps(microbatches(0, 24, 6))]
    assert found == [[0] * 6, [0] * 2 + [1] * 4, [1] * 4 + [2] * 2, [2] * 6]
    assert next(loader.validation(microbatches(0, 2))).batch[1].tolist() == [0, 0]
    assert next(loader.steps(microbatches(6, 10))).batch[1].tolist() == [0, 0, 1, 1]


class Augmented(Noisy):
    def without_augmentation(self) -> list[tuple[Any, ...]]:
        return [(torch.full((4,), float(index)), index) for index in range(50)]


def test_held_out_samples_are_read_without_augmentation_where_the_dataset_can() -> None:
    loader = loader_of(Augmented(), validation_fraction=0.2)
    assert loader.num_validation == 10
    pixels, ids = next(loader.validation(microbatches(0, 10, 10))).batch
    assert torch.equal(pixels, ids[:, None].expand(-1, 4).float())
    noisy, ids = next(loader.steps(microbatches(0, 10, 10))).batch
    assert not torch.equal(noisy, ids[:, None].expand(-1, 4).float())

    class Short(Noisy):
        def without_augmentation(self) -> list[int]:
            return [1]

    with pytest.raises(DataError, match=r"Short.without_augmentation\(\) returned 1 samples, but the dataset has 50"):
        loader_of(Short())


@pytest.mark.parametrize(("num_cores", "expected"), [(1, 1), (2, 1), (3, 2), (64, 2)])
def test_processes_read_ahead_for_a_gpu_as_its_cores_allow_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, expected: int
) -> None:
    monkeypatch.setattr("steadfast.data.loader.cores_of_a_worker", lambda: num_cores)
    assert num_loader_processes(LoaderConfig(), on_gpu=True) == expected
    assert num_loader_processes(LoaderConfig(), on_gpu=False) == 0
    assert num_loader_processes(LoaderConfig(num_workers=0), on_gpu=True) == 0
    assert num_loader_processes(LoaderConfig(num_workers=3), on_gpu=False) == 3


class Spoilt:
    """Images of which one is not finite, one cannot be read, and one is not finite as it is augmented there."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, int]:
        if index == 7:
            raise OSError("gone")
        image = torch.ones(3)
        if index == 11:
            image[1] = float("nan")
        if index == 13:
            image[0] = torch.rand(()) / 0.0
        return image, index


def test_samples_that_are_not_finite_are_found_by_reading_them_again() -> None:
    loader = loader_of(Spoilt(), validation_fraction=0.0)
    assert sorted(loader.train.ids(0, 40)) == list(range(40))
    before = torch.get_rng_state()
    assert sorted(loader.train.not_finite(0, 40)) == [11, 13]
    assert torch.equal(torch.get_rng_state(), before)
    first = loader.train.ids(0, 40).index(11)
    assert loader.train.not_finite(first, first + 1) == [11]
