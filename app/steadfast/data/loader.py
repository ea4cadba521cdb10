"""Fetch microbatches as tensors on the device.

Random numbers and digests are keyed by sample, so they do not depend on the worker.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import pickle
import signal
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import connection
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from steadfast.config import DataConfig, LoaderConfig
from steadfast.data.batches import IGNORED, Batch, Leaf, Rows, convert, layout_of, stack, tensors_of
from steadfast.data.copies import StreamCopies
from steadfast.data.datasets import Collate, Dataset, build_collate, build_validation
from steadfast.data.fingerprint import fingerprint
from steadfast.data.order import Int64s, SampleOrder, UInt64s, sample_keys
from steadfast.data.processes import PREFETCHED, no_room, options_of_processes
from steadfast.data.randomness import own_randomness
from steadfast.errors import DataError, as_exception
from steadfast.plan import Microbatch
from steadfast.units import in_ranges
from steadfast.world.device import cores_of_a_worker

# The order of this many positions is computed at once, because numpy takes as long for eight as for hundreds.
_WINDOW = 1024
_PROCESSES_OF_A_GPU = 2
_VALIDATION_COLLATE = "data.validation.collate"
_NUM_NAMED = 8  # samples that a message names
_TEXT_BYTES = 512
_FINGERPRINT = "fingerprint"  # item of the DataLoader that asks for it
_DEATH_NEWS_S = 0.5  # time until the end of a loader process is known
_LACK = ", perhaps for lack of memory or room in /dev/shm: use fewer data.num_workers, or smaller samples"
_LIMITS = "raise the limit of open files (ulimit -n) or enlarge /dev/shm, or set data.num_workers=0"
_NOT_STARTED = (
    "a loader process ended as it started. Its own error is above. Without one, call fit under "
    '`if __name__ == "__main__":`, because a loader process imports the main module, or set data.num_workers=0'
)


class Fetched(NamedTuple):
    """Microbatch with its tensors.

    A pad has no weight, so its num_samples and digest are 0.
    """

    microbatch: Microbatch
    batch: Batch  # tensors (microbatch, *shape in the sample), unless a `collate` makes other shapes
    num_samples: int
    digest: int


class Loader:
    """Fetch training microbatches ahead, and validation microbatches on demand."""

    def __init__(
        self,
        dataset: Dataset,
        order: SampleOrder,
        config: DataConfig,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        vocab_size: int | None = None,
    ) -> None:
        """Build the loader.

        Floating point tensors become `dtype`, the type of the model's parameters. Tokens must be below `vocab_size`.
        """
        self._prepare: Callable[[Batch], Batch] = partial(convert, dtype=dtype)
        if device.type == "cuda":
            self._prepare = StreamCopies(device, dtype)
        # Returns, to any thread, what is being fetched: "while reading sample 3 (epoch 1)", or "".
        self.reading: Callable[[], str] = str
        on_gpu = device.type == "cuda"
        num_workers = num_loader_processes(config, on_gpu)
        self._collate = build_collate(config, "data.collate", dataset)
        train = _Stream(order.train, order.num_train, order.seed, vocab_size)
        self.train = _Microbatches(dataset, train, self._collate, "data.collate", num_workers)
        # The seed is that of the training data, so that two parts of one `random_split` do not overlap.
        with own_randomness(order.seed):
            held_out = build_validation(config, dataset)
        self.num_validation = order.num_validation
        ids: Callable[[Int64s], Int64s] = order.validation
        if config.has_own_validation:
            self.num_validation = len(held_out)
            ids = _unchanged
        # Without validation samples an epoch has no length to divide by, so its length is at least 1.
        validation = _Stream(ids, max(1, self.num_validation), order.seed, vocab_size, "validation sample")
        self._validation_collate = build_collate(config.validation, _VALIDATION_COLLATE, held_out)
        self._validation = _Microbatches(held_out, validation, self._validation_collate, _VALIDATION_COLLATE)
        self._sampler = _Sampler()
        # One DataLoader serves all attempts, because starting its processes again would take seconds in each attempt.
        self._loader = _data_loader(self.train, self._sampler, num_workers, on_gpu)
        self.num_ahead = num_workers * PREFETCHED + 1  # microbatches that are read in advance
        self._steps: Callable[[], _Ahead | None] = lambda: None  # weak, since fetching refers to this loader
        # Without loader processes and pinned memory a DataLoader only adds 0.1 ms per microbatch.
        self._in_place = not on_gpu and not num_workers

    def steps(self, microbatches: Iterator[Microbatch]) -> Iterator[Fetched]:
        """Fetch training microbatches, `num_ahead` in advance.

        A call ends the fetching of the last call. Raises DataError.
        """
        if self._in_place:
            fetching = self._fetch_in_place(self.train, microbatches)
        else:
            # This starts the fetching, which continues while the caller prepares its first step.
            fetching = self._receive(self._start(microbatches))
        ahead = _Ahead(fetching)
        self._steps = weakref.ref(ahead)
        return ahead

    def fetch_ahead(self) -> None:
        """Fetch the next microbatch of `steps` before it is asked for."""
        if (ahead := self._steps()) is not None:
            ahead.fetch()

    def fingerprint(self) -> str:
        """Return the fingerprint of the dataset, whose samples a loader process reads if there is one.

        Raises DataError.
        """
        if self._in_place:
            found = self.train[_FINGERPRINT]
        else:
            (found,) = self._received(self._start(iter([_FINGERPRINT])))
        if isinstance(found, DataError):
            raise found
        return str(found)

    def _start(self, items: Iterator[Microbatch | str]) -> Iterator[Any]:
        self._sampler.items = items
        try:
            return iter(self._loader)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise DataError(
                f"loader processes cannot pickle the dataset, its collate function or order ({error}); "
                "data.num_workers=0 starts no loader processes"
            ) from error
        except (BrokenPipeError, EOFError):
            raise DataError(_NOT_STARTED) from None
        except OSError as error:
            raise DataError(f"loader processes cannot run ({error}): {_LIMITS}") from error

    def validation(self, microbatches: Iterator[Microbatch]) -> Iterator[Fetched]:
        """Fetch the microbatches of validation positions.

        Raises DataError if samples cannot be batched.
        """
        # Validation is rare, so it has no loader processes of its own.
        return self._fetch_in_place(self._validation, microbatches)

    def check_validation(self, size: int) -> None:
        """Check that validation samples can be stacked without a collate function.

        The check is needed if only training has a function that makes batches. It reads one microbatch of `size`
        samples of training and validation.

        Raises:
            DataError: the samples cannot be stacked, or lack entries that training batches have by name.
        """
        # Without the check the run would fail at its first validation, perhaps after hours.
        if self._collate is None or self._validation_collate is not None or not self.num_validation:
            return
        # At least two samples are read, because a single sample can always be stacked.
        fetched = self._validation[Microbatch(1, 0, 0, min(max(size, 2), self.num_validation))]
        if isinstance(fetched, DataError):
            raise DataError(f"{_VALIDATION_COLLATE} is missing, and data.collate is for training only: {fetched}")
        batch = self.example(size)
        if not isinstance(batch, Mapping):
            return
        missing = set(batch)
        if isinstance(fetched.batch, Mapping):
            missing -= set(fetched.batch)
        if missing:
            names = ", ".join(sorted(map(str, missing)))
            raise DataError(
                f"{_VALIDATION_COLLATE} is missing, and data.collate is for training only: stacked validation samples "
                f"lack {names}, which training batches have. Name a function that makes batches, or "
                "torch.utils.data:default_collate if stacked samples are right"
            )

    def example(self, size: int) -> Batch:
        """Return the first `size` training samples as a batch. Raises DataError."""
        return self.fetch(Microbatch(1, 0, 0, size, 1)).batch

    def fetch(self, microbatch: Microbatch) -> Fetched:
        """Fetch one training microbatch in place.

        The microbatches that `steps` fetches ahead are not affected. Raises DataError.
        """
        (fetched,) = self._fetch_in_place(self.train, iter([microbatch]))
        return fetched

    def close(self) -> None:
        """End the loader processes. Nothing can be fetched afterwards."""
        # A DataLoader ends its processes when it is collected, and removes its semaphores. Ray kills this process with
        # all of its children, so semaphores that still exist then would stay in /dev/shm.
        del self._loader
        gc.collect()

    def _fetch_in_place(self, dataset: _Microbatches, microbatches: Iterator[Microbatch]) -> Iterator[Fetched]:
        for microbatch in microbatches:
            self.reading = lambda: dataset.reading
            fetched = dataset[microbatch]
            self.reading = str
            yield self._to_device(fetched)

    def _receive(self, fetching: Iterator[Fetched | DataError]) -> Iterator[Fetched]:
        for fetched in self._received(fetching):
            yield self._to_device(fetched)

    def _received(self, fetching: Iterator[Any]) -> Iterator[Any]:
        while True:
            self.reading = self._read_for_next
            try:
                item = next(fetching, None)
            except (OSError, EOFError, RuntimeError) as error:
                # Frames of the traceback would keep the loader processes.
                raise self._cause_of(error.with_traceback(None)) from None
            finally:
                self.reading = str
            if item is None:
                return
            yield item

    def _read_for_next(self) -> str:
        """Return the samples that the next microbatch waits for in its loader process."""
        fetching: Any = self._loader._iterator
        return self.train.read_by(fetching._task_info[fetching._rcvd_idx][0])

    def _cause_of(self, error: Exception) -> Exception:
        """Return how a loader process has ended, or `error` if all live."""
        fetching: Any = self._loader._iterator
        connection.wait([process.sentinel for process in fetching._workers], _DEATH_NEWS_S)
        for number, process in enumerate(fetching._workers):
            code, reading = process.exitcode, self.train.read_by(number)
            if code is None:
                continue
            if code > 0 and not reading:
                return DataError(_NOT_STARTED)
            what = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            advice = _LACK if -code in (signal.SIGKILL, signal.SIGBUS) else ""
            return RuntimeError(f"a loader process {what} {reading}{advice}")
        return error

    def _to_device(self, fetched: Fetched | DataError) -> Fetched:
        if isinstance(fetched, DataError):
            raise fetched
        return fetched._replace(batch=self._prepare(fetched.batch))


class _Ahead:
    """Iterator that can fetch its next item early.

    What the fetch raises is raised when the item is asked for.
    """

    def __init__(self, items: Iterator[Fetched]) -> None:
        self._items = items
        self._held: list[Fetched | Exception] = []

    def __iter__(self) -> Iterator[Fetched]:
        return self

    def __next__(self) -> Fetched:
        if not self._held:
            return next(self._items)
        item = self._held.pop()
        if isinstance(item, Exception):
            raise item
        return item

    def fetch(self) -> None:
        if self._held:
            return
        try:
            self._held.append(next(self._items))
        except Exception as error:
            self._held.append(error)


class _Sampler:
    """Sampler of the DataLoader, which yields the items of the latest call.

    Each item is read from the iterator when the DataLoader needs it.
    """

    items: Iterator[Microbatch | str] = iter(())

    def __iter__(self) -> Iterator[Microbatch | str]:
        return self.items


class _Stream(NamedTuple):
    """Endless stream of positions in a dataset."""

    ids: Callable[[Int64s], Int64s]  # maps positions to samples
    epoch_length: int  # positions of an epoch
    seed: int  # of the samples' random numbers
    vocab_size: int | None = None
    noun: str = "sample"  # of a sample, for messages


class _Microbatches:
    """Dataset indexed by microbatch.

    The DataLoader reads from this dataset, and its processes hold a copy.
    """

    def __init__(
        self, dataset: Dataset, stream: _Stream, collate: Collate | None, key: str, num_processes: int = 0
    ) -> None:
        """Read the samples of a stream.

        `key` is the configuration key of `collate`, for messages.
        """
        self.reading = ""  # names the samples that this process reads
        # The same for each loader process, in shared memory: a process that hangs or was killed cannot be asked.
        self._texts = [multiprocessing.RawArray("c", _TEXT_BYTES) for _ in range(num_processes)]
        self._dataset = dataset
        self._stream = stream
        self._collate = collate
        self._key = key
        self._set_epoch: Callable[[int], object] | None = getattr(dataset, "set_epoch", None)
        self._read_batch: Callable[[Int64s], Batch] | None = getattr(dataset, "read_batch", None)
        self._is_augmented: bool = getattr(dataset, "is_augmented", True)
        self._read_samples: Callable[[list[int]], Sequence[Any]] | None = None
        if not self._is_augmented and self._set_epoch is None:
            self._read_samples = getattr(dataset, "__getitems__", None)
        self._window = (0, np.empty(0, np.int64), np.empty(0, np.uint64))  # first position, ids and keys
        self._layout: list[Leaf] | None = None

    def __getitem__(self, microbatch: Microbatch | str) -> Any:
        """Return a microbatch as Fetched, or the DataError that it raised; for _FINGERPRINT the fingerprint."""
        self.reading = "while ordering samples"
        try:
            if isinstance(microbatch, str):
                return fingerprint(self._dataset, lambda index: self._mark(0, [index]))
            ids, keys = self._ordered(microbatch.start, microbatch.stop)
            self._mark(microbatch.start, ids.tolist())
            if self._read_batch:
                batch = self._read_batch(ids)
            else:
                batch = self._read(microbatch.start, ids.tolist(), keys.tolist())
            if self._stream.vocab_size is not None:
                self._check_tokens(ids, batch, self._stream.vocab_size)
        except DataError as error:
            # The error is returned, because raised in a loader process its message would be buried in that process's
            # traceback.
            return error
        except (Exception, SystemExit) as error:
            if full := no_room(error, self.reading):
                return full
            # SystemExit would end a loader process without reporting the exception.
            raised = as_exception(error)
            raised.add_note(self.reading)
            if raised is error:
                raise
            raise raised from None
        # The samples of a pad are counted in a microbatch with a weight.
        if microbatch.weight == 0:
            return Fetched(microbatch, batch, num_samples=0, digest=0)
        return Fetched(microbatch, batch, len(ids), int(keys.sum()))

    def read_by(self, process: int) -> str:
        """Return what `reading` is in a loader process."""
        return bytes(self._texts[process].value).decode()

    def digest(self, start: int, stop: int) -> int:
        """Return a digest of the ids and positions of the samples at positions [start, stop)."""
        _, keys = self._ordered(start, stop)
        return int(keys.sum())

    def ids(self, start: int, stop: int) -> list[int]:
        """Return the ids of the samples at positions [start, stop)."""
        ids, _ = self._ordered(start, stop)
        found: list[int] = ids.tolist()
        return found

    def not_finite(self, start: int, stop: int) -> list[int]:
        """Read the samples at positions [start, stop) again, and return ids of those with a NaN or infinity."""
        ids, keys = self._ordered(start, stop)
        found = []
        # Each sample is read alone, because a batch does not show which of its samples holds the number.
        for position, (index, key) in enumerate(zip(ids.tolist(), keys.tolist(), strict=True), start):
            with contextlib.suppress(Exception):  # a sample that raises is not reported here
                sample = self._sample(position, index, key)
                if not all(bool(tensor.isfinite().all()) for tensor in tensors_of(stack([sample]))):
                    found.append(index)
        return found

    def _ordered(self, start: int, stop: int) -> tuple[Int64s, UInt64s]:
        """Return ids and keys of the samples at positions [start, stop)."""
        first, ids, keys = self._window
        if not first <= start <= stop <= first + len(ids):
            # The window begins before `start`, because a pad repeats the first position of its step.
            first = max(0, start - _WINDOW)
            positions = np.arange(first, max(stop, start + _WINDOW))
            ids = self._stream.ids(positions)
            keys = sample_keys(ids, positions, self._stream.seed)
            self._window = (first, ids, keys)
        wanted = slice(start - first, stop - first)
        return ids[wanted], keys[wanted]

    def _mark(self, position: int, ids: list[int]) -> None:
        """Record that this process reads these samples."""
        named = in_ranges(self._stream.noun, ids[:_NUM_NAMED]) + ", ..." * (len(ids) > _NUM_NAMED)
        self.reading = f"while reading {named} (epoch {position // self._stream.epoch_length + 1})"
        if process := get_worker_info():
            self._texts[process.id].value = self.reading.encode()

    def _check_tokens(self, ids: Int64s, batch: Any, vocab_size: int) -> None:
        """Raise DataError if the model has no embedding for a token."""
        inputs, targets = (batch, batch["labels"]) if isinstance(batch, Mapping) else batch
        if isinstance(inputs, Mapping):
            inputs = inputs["input_ids"]
        for tokens, least in ((inputs, 0), (targets, IGNORED)):
            outside = (tokens < least) | (tokens >= vocab_size)
            if outside.any():
                row = int(outside.nonzero()[0, 0])
                raise DataError(
                    f"token {int(tokens[outside][0])} in {self._stream.noun} {ids[row]}, but model.vocab_size is "
                    f"{vocab_size}: set it above the largest token, or use another tokenizer"
                )

    def _read(self, start: int, ids: list[int], keys: list[int]) -> Batch:
        """Read samples, from a position on, and make a batch."""
        samples: Any  # a sequence
        if self._read_samples is not None:
            samples = self._read_samples(ids)
        else:
            positions = range(start, start + len(ids))
            samples = list(map(self._sample, positions, ids, keys))
            self._mark(start, ids)
        if self._collate is not None:
            # `collate` may draw random numbers, for masking for example; they are keyed by the batch's first sample.
            with own_randomness(keys[0]):
                return self._collate(list(samples) if isinstance(samples, Rows) else samples)
        self._check_layout(ids, samples)
        return stack(samples)

    def _sample(self, position: int, index: int, key: int) -> Any:
        self._mark(position, [index])
        if self._set_epoch is not None:
            self._set_epoch(position // self._stream.epoch_length)
        if not self._is_augmented:
            return self._dataset[index]
        with own_randomness(key):
            return self._dataset[index]

    def _check_layout(self, ids: list[int], samples: Sequence[Any]) -> None:
        if isinstance(samples, Rows):  # of one layout
            ids, samples = ids[:1], [samples[0]]
        for index, sample in zip(ids, samples, strict=True):
            layout = layout_of(sample)
            if layout == self._layout:
                continue
            if not any(map(_is_numeric, layout)):
                raise DataError(f"sample {index} is {sample!r:.80}, expected tensors, arrays or numbers")
            if self._layout is None:
                # The first sample that this process reads defines the layout of all samples.
                self._layout = layout
            else:
                expected = f"expected {_in_words(self._layout)} as in the samples before it"
                remedy = f"For samples of different sizes name a function that pads the samples as {self._key}"
                raise DataError(f"sample {index} is {_in_words(layout)}, {expected}. {remedy}")


def _is_numeric(leaf: Leaf) -> bool:
    return isinstance(leaf.kind, torch.dtype | np.dtype) or leaf.kind in (int, float)


def num_loader_processes(config: LoaderConfig, on_gpu: bool) -> int:
    """Return the number of processes that read samples for a worker."""
    if config.num_workers != "auto":
        return config.num_workers
    # A GPU must not wait for a sample to be decoded. On a CPU, loader processes would take cores from training.
    if not on_gpu:
        return 0
    # The trainer needs one core of its own. One process reads ahead even if it has to share that core.
    return max(1, min(_PROCESSES_OF_A_GPU, cores_of_a_worker() - 1))


def _data_loader(
    dataset: _Microbatches, sampler: _Sampler, num_workers: int, pin_memory: bool
) -> DataLoader[Fetched | DataError]:
    return DataLoader(
        dataset,  # type: ignore[arg-type]  # a DataLoader needs only __getitem__
        # An item of the dataset is already a whole microbatch, so the DataLoader makes no batches of its own.
        batch_size=None,
        sampler=sampler,
        collate_fn=_unchanged,
        num_workers=num_workers,
        pin_memory=pin_memory,
        # A DataLoader draws from the global generator at each start unless it has a generator of its own.
        generator=torch.Generator(),
        **options_of_processes(num_workers),
    )


def _in_words(layout: list[Leaf]) -> str:
    """Return a layout as text, such as `(float32 (64,), int64 ())`."""
    return f"({', '.join(map(str, layout))})"


def _unchanged(given: Any) -> Any:
    return given
