"""Microbatches in, tensors on the device out. Randomness and digest are keyed by sample, not by worker."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from app.config import DataConfig
from app.data.datasets import Dataset
from app.data.order import Int64s, SampleOrder, UInt64s, sample_keys
from app.errors import DataError
from app.plan import Microbatch

_WINDOW = 1024  # positions ordered at once: numpy's overhead for eight is that for hundreds

Form = list[tuple[Any, Any]]  # (dtype or type, shape) of each part of a sample


class Fetched(NamedTuple):
    """A microbatch with its tensors. num_samples and digest are 0 for a pad, which counts for nothing."""

    microbatch: Microbatch
    batch: tuple[Tensor, ...]  # each (microbatch, *shape in the sample)
    num_samples: int
    digest: int


class Loader:
    """Training fetches ahead through one DataLoader; validation, which is rare, fetches in place."""

    def __init__(
        self, dataset: Dataset, order: SampleOrder, config: DataConfig, seed: int, device: torch.device
    ) -> None:
        self._device = device
        self._train = _Fetch(dataset, order.train, seed)
        self._validation = _Fetch(dataset, order.validation, seed)
        self._stream = _Stream()
        self.num_ahead = config.num_workers * config.prefetch_factor  # microbatches read before they are asked for
        # Without processes to fetch ahead or memory to pin, a DataLoader is 0.1 ms of overhead a microbatch.
        self._in_place = device.type == "cpu" and not config.num_workers
        workers: dict[str, Any] = {}
        if config.num_workers:
            # fork breaks CUDA and Ray's threads; forkserver imports torch once, not once for each worker.
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["torch"])
            workers = {"multiprocessing_context": context, "persistent_workers": True}
            workers["prefetch_factor"] = config.prefetch_factor
        self._loader: DataLoader[Fetched | DataError] = DataLoader(
            self._train,  # type: ignore[arg-type]  # any __getitem__ will do
            batch_size=None,
            sampler=self._stream,
            collate_fn=_as_it_is,
            num_workers=config.num_workers,
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # else every start of the DataLoader draws from the global one
            **workers,
        )

    def steps(self, microbatches: Iterator[Microbatch]) -> Iterator[Fetched]:
        """Each microbatch, fetched: num_workers x prefetch_factor ahead, from this call on. A call ends the
        one before it. DataError if a sample cannot be batched."""
        if self._in_place:
            return self._fetched_by(self._train, microbatches)
        self._stream.microbatches = microbatches
        return map(self._placed, iter(self._loader))

    def validation(self, microbatches: Iterator[Microbatch]) -> Iterator[Fetched]:
        """The same over validation positions."""
        return self._fetched_by(self._validation, microbatches)

    def digest(self, start: int, stop: int) -> int:
        """The samples digest of training positions [start, stop), as the order has it rather than as it was fetched."""
        return self._train.digest(start, stop)

    def _fetched_by(self, fetch: _Fetch, microbatches: Iterator[Microbatch]) -> Iterator[Fetched]:
        return (self._placed(fetch[microbatch]) for microbatch in microbatches)

    def _placed(self, fetched: Fetched | DataError) -> Fetched:
        if isinstance(fetched, DataError):
            raise fetched
        if self._device.type == "cpu":
            return fetched
        return fetched._replace(batch=tuple(part.to(self._device, non_blocking=True) for part in fetched.batch))


class _Stream:
    """The DataLoader's sampler: the microbatches of the latest call, read as they are needed."""

    microbatches: Iterator[Microbatch] = iter(())

    def __iter__(self) -> Iterator[Microbatch]:
        return self.microbatches


class _Fetch:
    """A dataset indexed by microbatch: what lives in the worker processes."""

    def __init__(self, dataset: Dataset, ids: Callable[[Int64s], Int64s], seed: int) -> None:
        self._dataset, self._ids, self._seed = dataset, ids, seed
        self._read_batch: Callable[[Int64s], tuple[Tensor, ...]] | None = getattr(dataset, "read_batch", None)
        self._window = (0, np.empty(0, np.int64), np.empty(0, np.uint64))
        self._form: Form | None = None

    def __getitem__(self, microbatch: Microbatch) -> Fetched | DataError:
        """A DataError is returned, since raising it here would bury its message in the worker's traceback."""
        ids, keys = self._ordered(microbatch.start, microbatch.stop)
        try:
            batch = self._read_batch(ids) if self._read_batch else self._collated(ids.tolist(), keys.tolist())
        except DataError as error:
            return error
        counted = bool(microbatch.weight)
        return Fetched(microbatch, batch, len(ids) * counted, int(keys.sum()) * counted)

    def digest(self, start: int, stop: int) -> int:
        return int(self._ordered(start, stop)[1].sum())

    def _ordered(self, start: int, stop: int) -> tuple[Int64s, UInt64s]:
        first, ids, keys = self._window
        if not first <= start <= stop <= first + len(ids):
            first = max(0, start - _WINDOW)  # pads look back
            positions = np.arange(first, max(stop, start + _WINDOW))
            ids = self._ids(positions)
            keys = sample_keys(ids, positions, self._seed)
            self._window = first, ids, keys
        wanted = slice(start - first, stop - first)
        return ids[wanted], keys[wanted]

    def _collated(self, ids: list[int], keys: list[int]) -> tuple[Tensor, ...]:
        """Every sample must look like the first that this process read."""
        samples = self._samples(ids, keys)
        for index, sample in zip(ids, samples, strict=True):
            form = _form(sample)
            self._form = self._form or form
            if form != self._form:
                raise DataError(f"sample {index} is {_said(form)}, expected {_said(self._form)} as those before it")
        batch = default_collate(samples)
        if not isinstance(batch, list | tuple) or not all(isinstance(part, Tensor) for part in batch):
            raise DataError(f"sample {ids[0]} is {samples[0]!r:.80}, expected a tuple of tensors, arrays or numbers")
        return tuple(batch)

    def _samples(self, ids: list[int], keys: list[int]) -> list[Any]:
        samples = []
        for index, key in zip(ids, keys, strict=True):
            with own_randomness(key):
                samples.append(self._dataset[index])
        return samples


@contextlib.contextmanager
def own_randomness(key: int) -> Iterator[None]:
    """Seeds every generator that an augmentation may draw from, and leaves them as they were: without worker processes
    they are the training loop's."""
    kept = torch.get_rng_state(), random.getstate(), np.random.get_state()
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
        np.random.set_state(kept[2])


def _form(sample: Any) -> Form:
    parts = sample if isinstance(sample, tuple | list) else ()
    return [(getattr(part, "dtype", type(part)), getattr(part, "shape", ())) for part in parts]


def _said(form: Form) -> str:
    """`(float32 (64,), int64 ())`."""
    kinds = [getattr(kind, "__name__", str(kind)).removeprefix("torch.") for kind, _ in form]
    return "(" + ", ".join(f"{kind} {tuple(shape)}" for kind, (_, shape) in zip(kinds, form, strict=True)) + ")"


def _as_it_is(fetched: Any) -> Any:
    return fetched
