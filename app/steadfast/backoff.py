"""Delays between repeated tries."""

import random
from collections.abc import Iterator

# The global generator is seeded alike on all ranks, so all of them would draw the same delays.
_random = random.SystemRandom()


def delays(first_s: float, longest_s: float, jitter: float = 0.0) -> Iterator[float]:
    """Yield delays without end, each twice as long as the one before.

    Args:
        first_s: the first delay.
        longest_s: the longest delay.
        jitter: largest share of a delay that is randomly left out, from 0 to 1, so that processes that failed together
            do not try again together.
    """
    delay_s = first_s
    while True:
        yield delay_s * (1 - _random.uniform(0, jitter))
        delay_s = min(2 * delay_s, longest_s)
