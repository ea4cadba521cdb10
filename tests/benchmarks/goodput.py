"""Simulated goodput of a month of training on many GPUs, for several ways to go on after a failure.

python -m tests.benchmarks.goodput

Goodput is the useful share of all GPU-seconds. A failure ends the world, and so does the arrival of its replacement.
Each costs a stall, and a failure also costs steps that are done again. While GPUs are missing, a step takes as long as
the worker with the most microbatches.

Measured: the stalls of torchrun and Ray Train on two cores, and the parts of our stall (`python -m tests.scale`, and
CPU seconds of a rank for a message). Published: failures for each GPU and day (RSC-1), the time in which NCCL connects
96,000 GPUs (NCCLX), and the times in which gloo connects (pytorch/gloo#408). Assumed: everything else below.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.benchmarks.statistics import table

DAY_S = 86400.0
FAILURES = 6.5 / 1000 / 8  # for each GPU and day
STEP_S, MICROBATCHES = 5.0, 8  # of a whole world, for each GPU
NODE, SWITCH, SWITCH_SHARE = 8, 64, 0.02  # GPUs that one failure takes, and how often it is a switch
REPLACED_S, REPLACED_SIGMA = 300.0, 0.5  # until a replacement comes, lognormal
CHECKPOINT_S = 2.0  # for which training waits
NCCL_S = 265 / 96_000  # for each GPU
GLOO_S = {64: 0.1, 256: 0.5, 1024: 9.0, 2048: 18.0, 4096: 25.0, 8192: 85.0}  # below 2,048 assumed
CALL_S = 0.5e-3  # of the coordinator, for a call through Ray
COORDINATOR_S = 0.1e-3  # of the coordinator, for a worker of a world that forms again
HOP_S, COLLECTIVES = 31e-6, 9  # of a rank for a message of a ring, and collectives before the first step
WORKER_S = 0.55  # until a death is known and a worker has unwound, built and done its first step


def our_stall_s(n: int) -> float:
    sizes = np.log([*GLOO_S]), np.log([*GLOO_S.values()])
    growth = math.log2(GLOO_S[8192] / GLOO_S[4096])
    gloo_s = float(np.exp(np.interp(math.log(n), *sizes)) * max(1.0, n / 8192) ** growth)
    return WORKER_S + n * (2 * CALL_S + COORDINATOR_S + NCCL_S + COLLECTIVES * 2 * HOP_S) + gloo_s


@dataclass(frozen=True)
class Strategy:
    """A way to go on.

    Attributes:
        stall_s: seconds that a failure or an arrival costs a world of n GPUs.
        redone_s: seconds of work that a failure costs, from the seconds since the last checkpoint.
        checkpoints: whether training waits for checkpoints, at Young and Daly's interval.
    """

    name: str
    stall_s: Callable[[int], float]
    redone_s: Callable[[float], float]
    checkpoints: bool = False


STRATEGIES = (
    Strategy("torchrun, stall as measured with 2 ranks", lambda n: 9.0, lambda since_s: since_s, checkpoints=True),
    Strategy("Ray Train, checkpoint on failure", lambda n: 33.1 + NCCL_S * n, lambda since_s: STEP_S),
    Strategy("steadfast", our_stall_s, lambda since_s: STEP_S / 2),
)


def goodput(strategy: Strategy, n: int, days: float, seed: int) -> float:
    chance = np.random.default_rng(seed)
    failures_per_s = FAILURES * n / DAY_S
    interval_s = max(120.0, math.sqrt(2 * CHECKPOINT_S / failures_per_s)) if strategy.checkpoints else math.inf
    share_of_steps = 1 - CHECKPOINT_S / interval_s
    now_s = useful_s = stalled_until_s = 0.0
    absent: list[tuple[float, int]] = []  # when GPUs come back, and how many
    live = n
    next_failure_s = chance.exponential(1 / failures_per_s)
    while now_s < days * DAY_S:
        until_s = min(days * DAY_S, next_failure_s, absent[0][0] if absent else math.inf)
        speed = MICROBATCHES / math.ceil(n * MICROBATCHES / live - 1e-9)
        useful_s += max(0.0, until_s - max(now_s, stalled_until_s)) * speed * share_of_steps
        now_s = until_s
        if now_s == next_failure_s:
            lost = SWITCH if chance.random() < SWITCH_SHARE else NODE
            lost = min(lost, live - NODE)
            live -= lost
            heapq.heappush(absent, (now_s + REPLACED_S * chance.lognormal(0, REPLACED_SIGMA), lost))
            useful_s -= strategy.redone_s(chance.uniform(0, min(interval_s, now_s)))
            stalled_until_s = now_s + strategy.stall_s(n)
            next_failure_s = now_s + chance.exponential(1 / failures_per_s)
        elif absent and now_s == absent[0][0]:
            live += heapq.heappop(absent)[1]
            stalled_until_s = max(stalled_until_s, now_s) + strategy.stall_s(n)
    return max(0.0, useful_s) / (days * DAY_S)


def main() -> None:
    sizes = [64, 256, 1024, 4096, 16384]
    rows = [["", *(f"{n:,}" for n in sizes)], ["our stall, s", *(f"{our_stall_s(n):.1f}" for n in sizes)]]
    for strategy in STRATEGIES:
        found = [np.mean([goodput(strategy, n, days=30.0, seed=seed) for seed in range(10)]) for n in sizes]
        rows.append([f"{strategy.name}, %", *(f"{100 * each:.2f}" for each in found)])
    print(table(rows))


if __name__ == "__main__":
    main()
