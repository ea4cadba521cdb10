"""Randomness inside a microbatch."""

import torch

from app.data.order import keyed_hash
from app.plan import Microbatch


def seed_generators(seed: int, microbatch: Microbatch, device: torch.device) -> None:
    """Key dropout by (seed, step, microbatch), so that it does not matter which rank draws it."""
    key = keyed_hash(seed, microbatch.step, microbatch.index) >> 1  # generators take 63 bits
    # `torch.manual_seed` would take 80 us instead of 1, because it looks at every accelerator.
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(key)
