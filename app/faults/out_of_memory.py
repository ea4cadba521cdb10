"""Memory of the device that has run out in a step, and what follows from it: smaller forwards."""

import torch

from app.errors import TrainingError


class OutOfMemory(Exception):
    """Ends the attempt on every rank, not the run: in the next one a forward has `forward_size` samples at the most."""

    def __init__(self, forward_size: int, error: str) -> None:
        super().__init__(forward_size, error)
        self.forward_size = forward_size
        self.error = error

    def __str__(self) -> str:
        return f"{self.error}; forwards go on with {self.forward_size} samples"


def smaller(num_samples: int, error: torch.OutOfMemoryError) -> OutOfMemory:
    """Return what to raise after a forward or backward of so many samples has run out of memory.

    Raises:
        TrainingError: it was of one sample, and there is nothing smaller.
    """
    if num_samples == 1:
        raise TrainingError(
            f"a forward of one sample does not fit into memory: {error}. What may help: "
            "memory.activation_checkpointing=full, parallel.kind=fsdp with more workers, precision.kind=bf16, shorter "
            "samples; `main.py plan` says what takes how much"
        ) from error
    return OutOfMemory((num_samples + 1) // 2, str(error).partition("\n")[0])
