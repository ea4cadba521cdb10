"""Build the datasets of training and validation.

Datasets are map-style: `dataset[index]` is a sample.
"""

import glob
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from steadfast.config import (
    DataConfig,
    HeldOut,
    HuggingFaceSource,
    ImageFolderSource,
    MixtureSource,
    ShardsSource,
    Source,
    TextSource,
    TokensSource,
)
from steadfast.config.base import Section
from steadfast.config.target import build_function, build_target
from steadfast.data.batches import IGNORED, Batch, map_tensors
from steadfast.data.huggingface import open_huggingface
from steadfast.data.images import open_image_folder
from steadfast.data.mixture import Mixture
from steadfast.errors import DataError
from steadfast.run.directory import place_of_data, runs_root

_INDEX = (
    "Write its samples into shards once, by `steadfast index --config FILE --out FOLDER`, or return a map-style "
    "dataset, whose samples have an index"
)
Collate = Callable[[list[Any]], Batch]


class Dataset(Protocol):
    """Map-style dataset.

    A sample has tensors, arrays or numbers in tuples, mappings or dataclasses.

    Optional attributes:
        units_per_sample: what a sample adds to the loss count; 1 if absent.
        counts_vary: False promises that no target is ever masked, which saves a collective in every step.
        read_batch: a method (ids) -> collated samples, for a dataset without random augmentation.
        is_augmented: False promises that __getitem__ draws no random numbers, so none are seeded for a sample. Then a
            method __getitems__ (ids) -> samples is called if there is one.
        without_augmentation: a method () -> the same samples without augmentation, for validation.
        set_epoch: a method (epoch), called before samples of another epoch are read; epochs count from 0, and
            validation reads epoch 0. Not with read_batch.
        classes: names of the classes; data for validation must have the same names.
        blocks: id of the first sample of each block of samples that are read together, for data.order=blocks.
        digest: text that changes when the data change, which a resume refuses.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class _TokenWindows:
    """Tokens cut into windows that overlap by one token.

    A window has context_length + 1 tokens. The overlap makes the last token of a window the first of the next, so that
    every token except the very first is a target.

    Args:
        tokens: (tokens,), of any integer type.
        end_token: token that ends a document, or None.
    """

    is_augmented = False

    def __init__(self, tokens: NDArray[Any], context_length: int, source: str, end_token: int | None = None) -> None:
        if len(tokens) <= context_length:
            needed = f"context_length {context_length} needs {context_length + 1}"
            raise DataError(f"{source!r} holds {len(tokens)} tokens; {needed}")
        self.tokens = tokens
        # Each token but the first of a window is a target, and adds one to the loss count.
        self.units_per_sample = context_length
        # Without documents all tokens of a window except the first are targets, so none is masked.
        self.counts_vary = end_token is not None
        self._end_token = end_token
        self._offsets = np.arange(context_length + 1)

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.units_per_sample

    def __getitem__(self, index: int, /) -> Batch:
        """Return (inputs, targets), each int64 (context_length,)."""
        return map_tensors(lambda tensor: tensor[0], self.read_batch(np.array([index])))

    def read_batch(self, ids: NDArray[np.int64]) -> Batch:
        """Return (inputs, targets), each int64 (len(ids), context_length).

        With documents, inputs is a mapping of `input_ids` and `position_ids`.
        """
        # One gather reads all windows, so nothing has to be stacked.
        places = ids[:, None] * self.units_per_sample + self._offsets  # (ids, context + 1)
        windows = torch.from_numpy(self.tokens[places].astype(np.int64))
        inputs, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        if self._end_token is None:
            return inputs, targets
        ends = inputs == self._end_token
        # The next token belongs to another document.
        targets = targets.masked_fill(ends, IGNORED)
        return {"input_ids": inputs, "position_ids": positions_in_documents(ends)}, targets


class TextDataset(_TokenWindows):
    """Text read as bytes.

    The source is `python-docs` or a glob of files.
    """

    def __init__(self, source: str, context_length: int) -> None:
        super().__init__(np.frombuffer(_read_text(source), np.uint8), context_length, source)


class TokensDataset(_TokenWindows):
    """File of token ids, mapped into memory."""

    def __init__(self, path: str, dtype: str, context_length: int, end_token: int | None = None) -> None:
        self._arguments = path, dtype, context_length, end_token
        # Mapped files may be larger than memory, and loader processes share the pages.
        try:
            tokens = np.memmap(path, dtype, mode="r")
        except (OSError, ValueError) as error:
            raise DataError(f"{path!r} cannot be read as {dtype}: {error}") from error
        super().__init__(tokens, context_length, path, end_token)

    def __reduce__(self) -> tuple[Any, ...]:
        # Loader processes map the file again, because pickling a mapping would copy the whole file.
        return TokensDataset, self._arguments


def positions_in_documents(ends: Tensor) -> Tensor:
    """Return the position of each token in its document, int64 (windows, context).

    A window begins with position 0, although its first document may have begun in the window before.

    Args:
        ends: whether a token ends a document, bool (windows, context).
    """
    places = torch.arange(ends.shape[1]).expand_as(ends)
    begins = torch.zeros_like(places)
    begins[:, 1:] = (places[:, 1:] * ends[:, :-1]).cummax(1).values
    return places - begins


def build_dataset(config: Source, key: str = "data", keeps_indices: bool = True) -> Dataset:
    """Build the dataset of the section at `key`.

    With `keeps_indices`, new indices of shards are stored. Raises DataError if the data is unreadable, empty or too
    short.
    """
    match config:
        case TextSource():
            return TextDataset(place_of_data(config.source), config.context_length)
        case TokensSource():
            path = place_of_data(config.path)
            return TokensDataset(path, config.dtype, config.context_length, config.end_token)
        case ImageFolderSource():
            return open_image_folder(config, key)
        case HuggingFaceSource():
            return _checked(open_huggingface(config, key), config.path)
        case ShardsSource():
            # Importing pyarrow takes half a second, which a run without shards does not need.
            from steadfast.data.shard_files import Shards

            return Shards(config, key, keeps_indices)
        case MixtureSource():
            sources = enumerate(config.sources)
            return Mixture(
                [build_dataset(source, f"{key}.sources[{number}]", keeps_indices) for number, source in sources]
            )
    return _checked(build_target(config, key), config.target)


def _checked(dataset: Any, name: str) -> Dataset:
    """Check a dataset made by other code. Raises DataError."""
    if isinstance(dataset, DataLoader):
        raise DataError(
            f"{name} returned a {type(dataset).__name__}, whose batches, order and workers would not be used. Return "
            "its dataset, and configure data.order, data.collate, batch and data.num_workers instead"
        )
    for attribute in ("sampler", "batch_sampler"):
        if getattr(dataset, attribute, None) is not None:
            raise DataError(
                f"{name} returned a {type(dataset).__name__} with a {attribute}, which would not be used: remove this "
                "attribute, and name a function that orders or draws the samples as data.order"
            )
    if isinstance(dataset, IterableDataset):
        raise DataError(
            f"{name} returned a {type(dataset).__name__}, an IterableDataset: after a failure nothing records which "
            f"of its samples were used. {_INDEX}"
        )
    # The check comes before training, because an error in a loader process would come late and with a traceback.
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        # A stream of Ray Data or Hugging Face is no IterableDataset.
        is_stream = hasattr(dataset, "iter_rows") or hasattr(dataset, "__iter__")
        remedy = f". {_INDEX}" if is_stream else ""
        raise DataError(f"{name} returned a {type(dataset).__name__}, which lacks __len__ or __getitem__{remedy}")
    try:
        length = len(dataset)
    except TypeError as error:  # also raised if __len__ returns no int
        raise DataError(f"{name} returned a {type(dataset).__name__}, whose length cannot be read: {error}") from error
    if not length:
        raise DataError(f"{name} returned a dataset of 0 samples; at least 1 is needed")
    checked: Dataset = dataset
    return checked


def build_validation(config: DataConfig, dataset: Dataset) -> Dataset:
    """Return the data that validation reads, without augmentation.

    The data is the section `data.validation`, or the training data. Raises DataError.
    """
    held_out = dataset
    if config.validation is not None and not isinstance(config.validation, HeldOut):
        held_out = build_dataset(config.validation, "data.validation")
        _check_classes(dataset, held_out)
    if not hasattr(held_out, "without_augmentation"):
        return held_out
    plain: Dataset = held_out.without_augmentation()
    if len(plain) != len(held_out):
        name = f"{type(held_out).__name__}.without_augmentation()"
        raise DataError(f"{name} returned {len(plain)} samples, but the dataset has {len(held_out)}")
    return plain


def _check_classes(dataset: Dataset, held_out: Dataset) -> None:
    # A missing class folder would shift the labels of all classes after it.
    classes = getattr(dataset, "classes", None)
    others = getattr(held_out, "classes", None)
    if classes is not None and others is not None and list(classes) != list(others):
        differing = ", ".join(map(str, sorted({*classes} ^ {*others})))
        raise DataError(f"data.validation and data have different classes: {differing or 'their order differs'}")


def build_collate(section: Section | None, key: str, dataset: Dataset) -> Collate | None:
    """Return the user's function that makes batches of `dataset`.

    Returns None if the section at `key` names no function.

    Raises:
        DataError: the dataset makes batches itself, so the function would not be called.
    """
    config = getattr(section, "collate", None)
    if config is None:
        return None
    if hasattr(dataset, "read_batch"):
        raise DataError(f"{key}: {type(dataset).__name__}.read_batch makes the batches; remove one of the two")
    collate: Collate = build_function(config, key)
    return collate


def _read_text(source: str) -> bytes:
    # The docs are part of every Python, so that a first run downloads nothing.
    if source == "python-docs":
        from pydoc_data.topics import topics

        # Pages are sorted, because the order of samples must be the same on every machine.
        pages = [topics[name] for name in sorted(topics)]
        return "\n\n".join(pages).encode()
    paths = sorted(path for path in glob.glob(source, recursive=True) if Path(path).is_file())
    if not paths:
        places = " or ".join(dict.fromkeys((str(Path.cwd()), str(runs_root()))))
        raise DataError(f"{source!r} matches no file in {places}")
    return b"\n\n".join(Path(path).read_bytes() for path in paths)
