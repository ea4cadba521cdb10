"""Map-style datasets: `len(dataset)` samples, each a tuple of tensors, named by its index."""

import functools
import glob
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.config import TargetData, TextData, TokensData
from app.errors import DataError
from app.imports import build_target

Sample = tuple[Tensor, ...]


class Dataset(Protocol):
    """Two optional attributes: `units_per_sample`, what a sample adds to the loss count (1 if absent), and
    `read_batch(ids)`, samples already collated, for a dataset that draws nothing at random."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


class _Windows:
    """Windows of context_length + 1 tokens that overlap by one: every token but the first is a target."""

    tokens: NDArray[Any] | functools.cached_property[NDArray[Any]]

    def __init__(self, num_tokens: int, context_length: int, source: str) -> None:
        if num_tokens <= context_length:
            needed = f"context_length {context_length} needs {context_length + 1}"
            raise DataError(f"{source!r} holds {num_tokens} tokens; {needed}")
        self.units_per_sample = context_length
        self._num_windows = (num_tokens - 1) // context_length
        self._offsets = np.arange(context_length + 1)

    def __len__(self) -> int:
        return self._num_windows

    def __getitem__(self, index: int, /) -> Sample:
        """(inputs, targets), each int64 (context_length,)."""
        inputs, targets = self.read_batch(np.array([index]))
        return inputs[0], targets[0]

    def read_batch(self, ids: NDArray[np.int64]) -> Sample:
        """(inputs, targets), each int64 (len(ids), context_length): one gather, no stacking."""
        windows = self.tokens[ids[:, None] * self.units_per_sample + self._offsets].astype(np.int64)
        return torch.from_numpy(windows[:, :-1]).contiguous(), torch.from_numpy(windows[:, 1:]).contiguous()


class TextDataset(_Windows):
    """Text as bytes: `python-docs`, or the files that match a glob."""

    def __init__(self, source: str, context_length: int) -> None:
        self.tokens = np.frombuffer(_read_text(source), np.uint8)
        super().__init__(len(self.tokens), context_length, source)


class TokensDataset(_Windows):
    """A flat binary file of token ids, mapped into memory and never read whole."""

    def __init__(self, path: str, dtype: str, context_length: int) -> None:
        self._path, self._dtype = path, np.dtype(dtype)
        try:
            num_tokens, rest = divmod(Path(path).stat().st_size, self._dtype.itemsize)
        except OSError as error:
            raise DataError(f"{path!r} cannot be read: {error.strerror}") from error
        if rest:
            raise DataError(f"{path!r} is not a whole number of {dtype}: {rest} bytes remain")
        super().__init__(num_tokens, context_length, path)

    @functools.cached_property
    def tokens(self) -> NDArray[Any]:  # type: ignore[override]
        return np.memmap(self._path, self._dtype, mode="r")

    def __getstate__(self) -> dict[str, Any]:
        """Without the mapping, which would pickle as the whole file: each process maps it anew."""
        return {name: value for name, value in self.__dict__.items() if name != "tokens"}


def build_dataset(config: TextData | TokensData | TargetData) -> Dataset:
    """The dataset the config names; DataError if it is unreadable, empty or too short."""
    match config:
        case TextData():
            return TextDataset(config.source, config.context_length)
        case TokensData():
            return TokensDataset(config.path, config.dtype, config.context_length)
    dataset: Dataset = build_target(config.target, config.args, "data")
    if missing := [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]:
        raise DataError(f"{config.target} gave a {type(dataset).__name__} without {' and '.join(missing)}")
    if not len(dataset):
        raise DataError(f"{config.target} gave a dataset of 0 samples; at least 1 is needed")
    return dataset


def _read_text(source: str) -> bytes:
    if source == "python-docs":  # in every Python: an example that downloads nothing
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics)).encode()
    paths = sorted(path for path in glob.glob(source, recursive=True) if Path(path).is_file())
    if not paths:
        raise DataError(f"{source!r} matches no file in {Path.cwd()}")
    try:
        return b"\n\n".join(Path(path).read_bytes() for path in paths)
    except OSError as error:
        raise DataError(f"{error.filename!r} cannot be read: {error.strerror}") from error
