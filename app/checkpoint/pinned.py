"""Pinned host memory, which a GPU copies to without the CPU."""

import contextlib
import weakref

import torch
from torch import Tensor


def pin(memory: Tensor, device: torch.device) -> None:
    """Register memory with CUDA until the tensor is freed.

    If CUDA refuses, copies still work but are slower.
    """
    with torch.cuda.device(device):  # a new thread starts on device 0, where a context would take memory
        if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
            _consume_error(device)
            return
    # Linux soon reuses the addresses for other memory, which CUDA would take for this memory.
    finalizer = weakref.finalize(memory, _unpin, memory.data_ptr(), device)
    finalizer.atexit = False


def _unpin(address: int, device: torch.device) -> None:
    with contextlib.suppress(RuntimeError), torch.cuda.device(device):
        torch.cuda.synchronize(device)  # an interrupted copy may still be running
        if int(torch.cuda.cudart().cudaHostUnregister(address)):
            _consume_error(device)


def _consume_error(device: torch.device) -> None:
    # CUDA keeps a refusal as the thread's last error, and torch would raise that error after the next kernel.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
