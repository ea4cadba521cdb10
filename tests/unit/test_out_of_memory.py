"""Microbatches in parts."""

import pytest
import torch

from steadfast.data.loader import Fetched
from steadfast.data.parts import split
from steadfast.errors import TrainingError
from steadfast.guards.out_of_memory import OutOfMemory, halve_microbatch
from steadfast.plan import Microbatch


def fetched(num_samples: int, weight: int = 1) -> Fetched:
    microbatch = Microbatch(1, 0, 10, 10 + num_samples, weight)
    batch = {"x": torch.arange(num_samples), "y": (torch.arange(2 * num_samples).reshape(num_samples, 2), "text")}
    return Fetched(microbatch, batch, num_samples, 0)


@pytest.mark.parametrize(
    ("num_samples", "size", "num_parts", "expected", "weights"),
    [
        (5, 8, 1, [[0, 1, 2, 3, 4]], [1]),
        (5, 2, 3, [[0, 1], [2, 3], [4]], [1, 1, 1]),
        # Where forwards are collectives, a short microbatch runs as many as a whole one.
        (1, 2, 3, [[0], [0], [0]], [1, 0, 0]),
    ],
)
def test_parts_hold_each_sample_once(
    num_samples: int, size: int, num_parts: int, expected: list[list[int]], weights: list[int]
) -> None:
    parts = list(split(fetched(num_samples), size, num_parts))
    assert [part.batch["x"].tolist() for part in parts] == expected
    assert [part.weight for part in parts] == [part.microbatch.weight for part in parts] == weights
    assert sum(part.share for part in parts if part.weight) == pytest.approx(1)
    assert [part.num_samples for part in parts] == [len(part.batch["y"][0]) for part in parts]


def test_parts_of_a_pad_count_for_nothing_and_a_batch_that_is_not_cut_by_samples_is_refused() -> None:
    assert [part.weight for part in split(fetched(1, weight=0), 2, 2)] == [0, 0]
    packed = fetched(4)._replace(batch=torch.zeros(1, 12))
    with pytest.raises(
        TrainingError, match=r"a tensor of shape \(1, 12\) from the samples. Lower batch.microbatch_size"
    ):
        list(split(packed, 2, 2))


def test_each_time_half_of_the_samples_are_tried_unless_they_are_coupled() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory.\nA long story")
    sizes = [5]
    while sizes[-1] > 1:
        found = halve_microbatch(sizes[-1], error)
        assert isinstance(found, OutOfMemory)
        assert found.error == "CUDA out of memory."
        sizes.append(found.forward_size)
    assert sizes == [5, 3, 2, 1]
    with pytest.raises(TrainingError, match="a forward of one sample does not fit"):
        halve_microbatch(1, error)
    with pytest.raises(TrainingError, match=r"(?s)a forward of 4 samples does not .* task\.coupled=true keeps samples"):
        halve_microbatch(4, error, coupled=True)
