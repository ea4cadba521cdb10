"""Random seeds of a microbatch."""

import torch

from steadfast.data.order import keyed_hash
from steadfast.data.randomness import seed_host
from steadfast.plan import Microbatch

_VALIDATION = 0  # used in place of the step, which counts from 1


def seed_generators(seed: int, microbatch: Microbatch, device: torch.device) -> None:
    """Seed a training microbatch by (seed, step, microbatch), on every rank alike."""
    _seed(keyed_hash(seed, microbatch.step, microbatch.index), device)


def seed_validation(seed: int, microbatch: Microbatch, device: torch.device) -> None:
    """Seed a validation microbatch by (seed, first position), every time alike."""
    _seed(keyed_hash(seed, _VALIDATION, microbatch.start), device)


def _seed(key: int, device: torch.device) -> None:
    key >>= 1  # generators take 63 bits
    seed_host(key)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(key)
