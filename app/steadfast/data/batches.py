"""Handle samples and batches of any shape.

A sample or batch has tensors in nested tuples, lists, mappings and dataclasses.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

IGNORED = -100  # target value that cross_entropy ignores by default
# Tensors of samples, stacked along a new first dimension in the same containers as in the samples.
Batch = Any


class Leaf(NamedTuple):
    """Name, type and shape of one value in a sample.

    Two samples can be stacked if all their leaves are equal.
    """

    name: str  # keys and fields on the path to the value, "" in a tuple
    kind: Any  # dtype or type
    shape: tuple[int, ...]

    def __str__(self) -> str:
        kind = getattr(self.kind, "__name__", str(self.kind)).removeprefix("torch.")
        if not self.name:
            return f"{kind} {self.shape}"
        return f"{self.name}: {kind} {self.shape}"


class Rows(Sequence[Any]):
    """Samples of equal layout, column by column.

    Args:
        columns: arrays (samples, *shape in the sample) by name, which no other object refers to.
        are_tuples: whether a sample is a tuple of the values, not a mapping.
    """

    def __init__(self, columns: dict[str, NDArray[Any]], are_tuples: bool) -> None:
        self.columns = columns
        self.are_tuples = are_tuples

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: Any, /) -> Any:
        if self.are_tuples:
            return tuple(values[index] for values in self.columns.values())
        return {name: values[index] for name, values in self.columns.items()}

    def stacked(self) -> Batch:
        """Return the batch that `stack` makes of the samples."""
        tensors = {name: torch.from_numpy(values) for name, values in self.columns.items()}
        return tuple(tensors.values()) if self.are_tuples else tensors

    def layout(self) -> Any:
        """Return a key. Rows with equal keys can be joined."""
        return self.are_tuples, *((name, values.dtype, values.shape[1:]) for name, values in self.columns.items())


def in_order(parts: Sequence[Sequence[Any]], positions: Sequence[Sequence[int]]) -> Sequence[Any]:
    """Return the samples of all parts as one sequence.

    Args:
        parts: samples.
        positions: for each part, where its samples come in the sequence.
    """
    rows = [part for part in parts if isinstance(part, Rows)]
    if len(rows) == len(parts) and len({part.layout() for part in rows}) == 1:
        columns = {}
        for name, first in rows[0].columns.items():
            columns[name] = np.empty((sum(map(len, parts)), *first.shape[1:]), first.dtype)
            for found, places in zip(rows, positions, strict=True):
                columns[name][places] = found.columns[name]
        return Rows(columns, rows[0].are_tuples)
    samples: list[Any] = [None] * sum(map(len, parts))
    for part, places in zip(parts, positions, strict=True):
        for place, sample in zip(places, part, strict=True):
            samples[place] = sample
    return samples


def stack(samples: Sequence[Any]) -> Batch:
    """Stack samples to one batch in the same containers.

    Values that are no numbers become a list.
    """
    if isinstance(samples, Rows):
        return samples.stacked()
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: stack([sample[key] for sample in samples]) for key in first}
    if _has_parts(first):
        return _like(first, list(map(stack, zip(*map(_parts, samples), strict=True))))
    if isinstance(first, list):  # numbers in a list, which is how datasets store tokens
        return torch.stack(list(map(torch.as_tensor, samples)))
    if isinstance(first, Tensor | np.ndarray | np.generic | float | int):
        return default_collate(list(samples))
    return list(samples)


def map_tensors(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """Return the batch with `function` applied to each tensor."""
    if isinstance(batch, Tensor):
        return function(batch)
    each = functools.partial(map_tensors, function)
    if isinstance(batch, Mapping):
        return dict(zip(batch, map(each, batch.values()), strict=True))
    return map_parts(each, batch)


def convert(batch: Batch, dtype: torch.dtype) -> Batch:
    """Return the batch with its floating point tensors as `dtype`."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, batch)


def map_parts(function: Callable[[Any], Any], batch: Batch) -> Batch:
    """Return a container with `function` applied to each part.

    Containers are tuples, lists and dataclasses. Any other object is returned as it is.
    """
    if _has_parts(batch) or isinstance(batch, list):
        return _like(batch, list(map(function, _parts(batch))))
    return batch


def tensors_of(batch: Batch) -> Iterator[Tensor]:
    """Yield the tensors of a batch, always in the same order."""
    return (leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor))


def leaves_of(batch: Batch) -> Iterator[Any]:
    """Yield the tensors and other values of a batch, always in the same order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from leaves_of(value)
    elif _has_parts(batch) or isinstance(batch, list):
        for part in _parts(batch):
            yield from leaves_of(part)
    else:
        yield batch


def layout_of(sample: Any, name: str = "") -> list[Leaf]:
    """Return the leaves of a sample, in order."""
    if isinstance(sample, (Tensor, np.ndarray)):  # a union takes three times as long
        return [Leaf(name, sample.dtype, tuple(sample.shape))]
    if isinstance(sample, Mapping):
        return _layout_of(sample.items(), name)
    if is_dataclass(sample):
        return _layout_of(zip(_field_names(sample), _parts(sample), strict=True), name)
    if _has_parts(sample):
        return _layout_of([("", part) for part in sample], name)
    # `stack` makes a tensor of a list of numbers, so its length is a part of the layout.
    if isinstance(sample, list):
        sample = np.asarray(sample)
    return [Leaf(name, getattr(sample, "dtype", type(sample)), tuple(getattr(sample, "shape", ())))]


def _layout_of(items: Any, outer: str) -> list[Leaf]:
    leaves: list[Leaf] = []
    for key, value in items:
        name = f"{outer}.{key}" if outer and key != "" else f"{outer}{key}"
        leaves += layout_of(value, name)
    return leaves


def _has_parts(sample: Any) -> bool:
    """Return whether a sample is a tuple, a dataclass or a list of objects."""
    # A list of numbers is one value, because datasets store tokens in lists.
    if isinstance(sample, list):
        return not all(isinstance(part, float | int) for part in sample)
    return isinstance(sample, tuple) or (is_dataclass(sample) and not isinstance(sample, type))


def _parts(container: Any) -> Sequence[Any]:
    if is_dataclass(container):
        return [getattr(container, name) for name in _field_names(container)]
    parts: Sequence[Any] = container
    return parts


def _field_names(container: Any) -> list[str]:
    return [field.name for field in fields(container)]


def _like(container: Any, parts: list[Any]) -> Any:
    """Return a container of the same type with the given parts."""
    if is_dataclass(container) and not isinstance(container, type):
        return type(container)(**dict(zip(_field_names(container), parts, strict=True)))
    # A named tuple takes its parts as separate arguments, unlike a tuple.
    if isinstance(container, tuple) and hasattr(container, "_fields"):
        return type(container)(*parts)
    return parts if isinstance(container, list) else tuple(parts)
