"""Host memory that a GPU copies to by itself."""

import contextlib
import weakref

import torch
from torch import Tensor


def pin(memory: Tensor, device: torch.device) -> None:
    """Register memory with CUDA until the tensor is freed. Copies to memory that CUDA refuses are slower."""
    with torch.cuda.device(device):  # a new thread's is the first one, on which a context would take memory
        if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
            _consume_error(device)
            return
    # Linux soon gives the addresses to other memory, which CUDA would take for this one.
    finalizer = weakref.finalize(memory, _unpin, memory.data_ptr(), device)
    finalizer.atexit = False


def _unpin(address: int, device: torch.device) -> None:
    with contextlib.suppress(RuntimeError), torch.cuda.device(device):
        torch.cuda.synchronize(device)  # a copy that was broken off may be under way
        if int(torch.cuda.cudart().cudaHostUnregister(address)):
            _consume_error(device)


def _consume_error(device: torch.device) -> None:
    # CUDA keeps a refusal as the thread's last error, and torch raises that behind the thread's next kernel.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
