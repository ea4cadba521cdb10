"""The digest of gradients: each flip of a bit changes it, and nothing else does."""

import pytest
import torch
from torch import Tensor, nn

from steadfast.injection.flips import flip_bit
from steadfast.parallel import digest as module
from steadfast.parallel.buckets import GradientBuckets
from steadfast.parallel.digest import digest, sum_of_bits

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8)


def of(*tensors: Tensor) -> int:
    return int(digest(tensors))


def some(size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of any bits, NaN and infinities included."""
    generator = torch.Generator().manual_seed(seed)
    num_bytes = size * torch.empty((), dtype=dtype).element_size()
    return torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=generator).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [3, 1 << 20])
def test_every_bit_of_a_tensor_has_a_digest_of_its_own(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, chunk: int
) -> None:
    monkeypatch.setattr(module, "_CHUNK", chunk)
    module._weights.cache_clear()
    assert bool((module._weights(torch.device("cpu")) % 2).all()), "a difference in one word must not vanish"
    tensor = some(7, dtype, seed=1)
    width = 8 * tensor.element_size()
    before = of(tensor)
    found = {before}
    for element in range(7):
        for bit in range(width):
            flip_bit(tensor, element, bit)
            found.add(of(tensor))
            flip_bit(tensor, element, bit)
    assert len(found) == 1 + 7 * width
    assert of(tensor.clone()) == before
    module._weights.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_two_flips_of_the_highest_bits_do_not_cancel(dtype: torch.dtype) -> None:
    """A weight is odd, and the sum of two is even: times 2^63 that would be nothing."""
    tensor = some(40, dtype, seed=2)
    before, width = of(tensor), 8 * tensor.element_size()
    for bit in (width - 1, width - 2):
        for other in range(1, 40):
            flip_bit(tensor, 0, bit)
            flip_bit(tensor, other, bit)
            assert of(tensor) != before
            flip_bit(tensor, 0, bit)
            flip_bit(tensor, other, bit)


def test_numbers_that_change_places_change_it_also_across_chunks_and_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 4)
    module._weights.cache_clear()
    numbers = torch.arange(1.0, 13.0)
    found = {of(numbers), of(numbers.flip(0)), of(numbers[[4, 5, 6, 7, 0, 1, 2, 3, 8, 9, 10, 11]])}
    found |= {of(numbers[:4], numbers[4:]), of(numbers[4:], numbers[:4]), of(numbers[4:])}
    # As chunks of one tensor or as tensors of their own: the same words in the same places.
    assert len(found) == 5
    module._weights.cache_clear()


def test_that_of_buckets_is_of_all_gradients_of_a_model() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    buckets = GradientBuckets.of(model)
    zero = int(buckets.digest())
    model(torch.ones(2, 3)).sum().backward()
    before = int(buckets.digest())
    assert before != zero
    for parameter in model.parameters():
        assert parameter.grad is not None
        flip_bit(parameter.grad, 1, 3)
        assert int(buckets.digest()) != before
        flip_bit(parameter.grad, 1, 3)
    assert int(buckets.digest()) == before
    buckets.clear()
    assert int(buckets.digest()) == zero


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("start", "size", "bit"), [(0, 1, 0), (1, 7, 5), (3, 40, 15), (2, 9, 62)])
def test_the_sum_of_a_copy_s_bits_is_equal_wherever_it_lies_and_changes_with_each_bit(
    dtype: torch.dtype, start: int, size: int, bit: int
) -> None:
    whole = some(start + size, dtype, seed=size)
    there = whole[start:]  # not at a multiple of eight bytes
    copied = there.clone()
    assert sum_of_bits(there) == sum_of_bits(copied.view(torch.uint8)) == sum_of_bits(copied.view(1, -1))
    flip_bit(copied, bit % size, bit)
    assert sum_of_bits(there) != sum_of_bits(copied)
