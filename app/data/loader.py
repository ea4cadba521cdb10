"""Microbatches in, tensors on the device out. Randomness and digest are keyed by sample, not by worker."""

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
_UNCOLLATABLE = (AttributeError, RuntimeError, TypeError, ValueError)  # what torch raises for odd samples

Form = tuple[tuple[Any, ...], ...]  # (dtype, shape) of each tensor of a sample


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
        self._validation = _Fetch(dataset, order.validation, seed)
        self._stream = _Stream()
        self._running: Any = None
        workers: dict[str, Any] = {}
        if config.num_workers:
            # fork breaks CUDA and Ray's threads; forkserver imports torch once, not once for each worker.
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["torch"])
            workers["multiprocessing_context"] = context
            workers["prefetch_factor"] = config.prefetch_factor
            workers["persistent_workers"] = config.persistent_workers
        self._loader: DataLoader[Fetched | DataError] = DataLoader(
            _Fetch(dataset, order.train, seed),  # type: ignore[arg-type]  # any __getitem__ will do
            batch_size=None,
            sampler=self._stream,
            collate_fn=_as_it_is,
            num_workers=config.num_workers,
            pin_memory=device.type == "cuda" if config.pin_memory == "auto" else config.pin_memory,
            generator=torch.Generator(),  # else every start of the DataLoader draws from the global one
            **workers,
        )

    def steps(self, microbatches: Iterator[Microbatch]) -> Iterator[Fetched]:
        """Each microbatch, fetched: num_workers x prefetch_factor ahead, from this call on. A call ends the
        one before it. DataError if a sample cannot be batched."""
        if not self._loader.persistent_workers:
            self.close()
        self._stream.microbatches = microbatches
        self._running = iter(self._loader)
        return self._guarded(self._running)

    def validation(self, microbatches: Iterator[Microbatch]) -> Iterator[Fetched]:
        """The same over validation positions."""
        return (self._placed(self._validation[microbatch]) for microbatch in microbatches)

    def close(self) -> None:
        """End the worker processes; the next steps() starts others."""
        if hasattr(self._running, "_shutdown_workers"):
            self._running._shutdown_workers()
        self._running = self._loader._iterator = None

    def _guarded(self, results: Iterator[Fetched | DataError]) -> Iterator[Fetched]:
        try:
            yield from map(self._placed, results)
        except Exception:
            self.close()  # a DataLoader that lost a worker never recovers
            raise

    def _placed(self, fetched: Fetched | DataError) -> Fetched:
        if isinstance(fetched, DataError):
            raise fetched
        batch = tuple(tensor.to(self._device, non_blocking=True) for tensor in fetched.batch)
        return fetched._replace(batch=batch)


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
            if self._read_batch is not None:
                batch = self._read_batch(ids)
            else:
                batch = self._collated(ids.tolist(), self._read(ids.tolist(), keys.tolist()))
        except DataError as error:
            return error
        counted = bool(microbatch.weight)
        return Fetched(microbatch, batch, len(ids) * counted, int(keys.sum()) * counted)

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

    def _read(self, ids: list[int], keys: list[int]) -> list[Any]:
        items = []
        with _own_randomness():
            for sample, key in zip(ids, keys, strict=True):
                torch.default_generator.manual_seed(key)
                random.seed(key)
                np.random.seed(key & 0xFFFFFFFF)
                try:
                    items.append(self._dataset[sample])
                except Exception as error:
                    error.add_note(f"while reading sample {sample}")
                    raise
        return items

    def _collated(self, ids: list[int], items: list[Any]) -> tuple[Tensor, ...]:
        if self._form is None:
            self._form = _form_of(0, self._read([0], [0])[0])
        reason: Exception | None = None
        try:
            batch = tuple(default_collate(items))
            if _form(batch) == self._form:
                return batch
        except _UNCOLLATABLE as error:
            reason = error
        for sample, item in zip(ids, items, strict=True):
            if (seen := _form_of(sample, item)) != self._form:
                raise DataError(f"sample {sample} is {_said(seen)}, expected {_said(self._form)} as sample 0 is")
        raise DataError(f"samples {ids} cannot be batched: {reason}") from reason


def _form(batch: tuple[Tensor, ...]) -> Form:
    return tuple((part.dtype, part.shape[1:]) for part in batch)


def _form_of(sample: int, item: Any) -> Form:
    if isinstance(item, tuple | list) and item:
        with contextlib.suppress(*_UNCOLLATABLE):
            return _form(tuple(default_collate([item])))
    parts = ", ".join(type(part).__name__ for part in item) if isinstance(item, tuple | list) else ""
    seen = f"{type(item).__name__}({parts})"
    raise DataError(f"sample {sample} is a {seen}, expected a tuple of tensors, arrays or numbers")


def _said(form: Form) -> str:
    """`(float32 (64,), int64 ())`."""
    return "(" + ", ".join(f"{str(dtype).removeprefix('torch.')} {tuple(shape)}" for dtype, shape in form) + ")"


@contextlib.contextmanager
def _own_randomness() -> Iterator[None]:
    """Leave the generators as they were: without worker processes they are the training loop's."""
    kept = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
        np.random.set_state(kept[2])


def _as_it_is(fetched: Any) -> Any:
    return fetched
