"""A twin of the CUDA runtime for registered host memory: misuse that CUDA may pass over raises here."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = torch.device("cuda", 3)
SUCCESS, INVALID, OUT_OF_MEMORY, ALREADY_REGISTERED, NOT_REGISTERED = 0, 1, 2, 712, 713


class LikeCuda:
    """Registers host memory by its addresses, and remembers each thread's last error, as the CUDA runtime does.

    Attributes:
        mistakes: what a caller has done that CUDA would punish later, or in silence.
        registered: length in bytes of each registered range, by its first address.
        refuses: answer of each `cudaHostRegister` from now on, 0 to serve.
    """

    def __init__(self) -> None:
        self.mistakes: list[str] = []
        self.registered: dict[int, int] = {}
        self.refuses = SUCCESS
        self.threads: list[str] = []  # names of those that have registered something
        self._mapped: dict[int, int] = {}
        self._device = threading.local()
        self._last = threading.local()  # `error`: of this thread
        self._copying = False

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> _Answer:  # noqa: N802
        self._check_device()
        self.threads.append(threading.current_thread().name)
        if self.refuses:
            return self._answer(self.refuses)
        if any(_overlap(address, num_bytes, *other) for other in self.registered.items()):
            return self._answer(ALREADY_REGISTERED)
        if not any(start <= address and address + num_bytes <= start + own for start, own in self._mapped.items()):
            self.mistakes.append("memory is registered that is not mapped")
            return self._answer(INVALID)
        self.registered[address] = num_bytes
        return self._answer(SUCCESS)

    def cudaHostUnregister(self, address: int) -> _Answer:  # noqa: N802
        self._check_device()
        if self._copying:
            self.mistakes.append("memory is unregistered while a copy is under way")
        if self.registered.pop(address, None) is None:
            return self._answer(NOT_REGISTERED)
        return self._answer(SUCCESS)

    def synchronize(self, device: torch.device | None = None) -> None:
        self._copying = False

    def launch(self) -> None:
        """Launch a kernel, and raise this thread's last error, as torch's check behind each launch does."""
        error = getattr(self._last, "error", SUCCESS)
        self._last.error = SUCCESS
        if error:
            raise RuntimeError(f"CUDA error {error}")

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Begin a copy to host memory, which goes on until `synchronize`."""
        target.copy_(source)
        self._copying = True

    def map(self, *arguments: Any, **named: Any) -> mmap.mmap:
        memory = _Mapping(*arguments, **named)
        address, num_bytes = ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)
        self._mapped[address] = num_bytes
        memory.unmapped = lambda: self._unmap(address, num_bytes)
        return memory

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self._device.current = device
        try:
            yield
        finally:
            self._device.current = None

    def zeros(self, *size: Any, device: Any = None, **named: Any) -> Tensor:
        if device is not None and torch.device(device).type == "cuda":
            self.launch()
            device = None
        return _zeros(*size, device=device, **named)

    def _check_device(self) -> None:
        # In a new thread the current device is the first one, on which a context would take memory.
        if getattr(self._device, "current", None) != DEVICE:
            self.mistakes.append("the runtime is called for another device")

    def _answer(self, code: int) -> _Answer:
        if code:
            self._last.error = code
        answer = _Answer(code)
        weakref.finalize(answer, self._check_read, answer.read, code)
        return answer

    def _check_read(self, read: list[bool], code: int) -> None:
        if not read:
            self.mistakes.append(f"the answer {code} is ignored")

    def _unmap(self, address: int, num_bytes: int) -> None:
        del self._mapped[address]
        if any(_overlap(address, num_bytes, *other) for other in self.registered.items()):
            self.mistakes.append("registered memory is unmapped")


_zeros = torch.zeros


class _Answer:
    """An answer of the runtime, which somebody has to read."""

    def __init__(self, code: int) -> None:
        self._code = code
        self.read: list[bool] = []

    def __int__(self) -> int:
        self.read.append(True)
        return self._code


class _Mapping(mmap.mmap):
    """Mapped memory that says when it is unmapped."""

    unmapped: Any = None

    def __del__(self) -> None:
        if self.unmapped is not None:
            self.unmapped()


def _overlap(first: int, length: int, other: int, other_length: int) -> bool:
    return first < other + other_length and other < first + length


def behave_like_cuda(patch: pytest.MonkeyPatch) -> LikeCuda:
    """Have host memory that this process maps, pins and frees go through a twin of the CUDA runtime."""
    twin = LikeCuda()
    patch.setattr(torch.cuda, "cudart", lambda: twin)
    patch.setattr(torch.cuda, "synchronize", twin.synchronize)
    patch.setattr(torch.cuda, "device", twin.device)
    patch.setattr(torch, "zeros", twin.zeros)
    patch.setattr("steadfast.checkpoint.node_memory.mmap.mmap", twin.map)
    return twin
