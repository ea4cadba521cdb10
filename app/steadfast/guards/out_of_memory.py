"""React to an out-of-memory error with smaller forwards."""

import torch

from steadfast.errors import TrainingError


class OutOfMemory(Exception):
    """Signal that the next attempt needs smaller forwards.

    The exception ends the attempt on every rank, but not the run. In the next attempt a forward has at most
    `forward_size` samples.
    """

    def __init__(self, forward_size: int, error: str) -> None:
        super().__init__(forward_size, error)
        self.forward_size = forward_size
        self.error = error

    def __str__(self) -> str:
        return f"{self.error}; forwards go on with {self.forward_size} samples"


def halve_microbatch(num_samples: int, error: torch.OutOfMemoryError, coupled: bool = False) -> OutOfMemory:
    """Return the exception that halves the forward size.

    Args:
        num_samples: samples of the forward that ran out of memory.
        coupled: whether the samples of a microbatch must share a forward.

    Raises:
        TrainingError: the forward had one sample, or its samples are coupled.
    """
    if coupled and num_samples > 1:
        raise TrainingError(
            f"a forward of {num_samples} samples does not fit into memory: {error}. task.coupled=true keeps samples of "
            "a microbatch in one forward, because smaller forwards would change the loss. Lower "
            "batch.microbatch_size, which changes the loss too, or take memory.activation_checkpointing=full or "
            "precision.kind=bf16"
        ) from error
    if num_samples == 1:
        raise TrainingError(
            f"a forward of one sample does not fit into memory: {error}. What may help: "
            "memory.activation_checkpointing=full, parallel.kind=fsdp with more workers, precision.kind=bf16, shorter "
            "samples; `steadfast plan` says what takes how much"
        ) from error
    return OutOfMemory((num_samples + 1) // 2, str(error).partition("\n")[0])
