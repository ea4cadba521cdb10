"""Seed the generators of torch, numpy and Python."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


def seed_host(key: int) -> None:
    """Seed the generators of the host with a 63-bit key."""
    # `torch.manual_seed` looks at every accelerator, and would take 80 us instead of 1.
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # numpy takes 32 bits only


@contextlib.contextmanager
def kept_randomness() -> Iterator[None]:
    """Restore the states of the host's generators at the end."""
    torch_state = torch.get_rng_state()
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextlib.contextmanager
def own_randomness(key: int) -> Iterator[None]:
    """Seed the host's generators for an augmentation, and restore them at the end."""
    # Without loader processes the training loop uses the same generators, and dropout draws from one of them.
    with kept_randomness():
        seed_host(key)
        yield
