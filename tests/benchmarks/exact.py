"""What of the cost of an exact run lies where (sides.py has the whole), and what a check by recomputation adds to it.

python -m tests.benchmarks.exact --checks 20
python -m tests.benchmarks.exact --parts

A check has one microbatch computed twice, in every tenth step of a run; these steps are compared with those around
them. `--parts` times the pieces by themselves, in one process and between two: what the gradient of a microbatch takes
to become integers, the way back, and the sum over ranks of fp32 and of int64.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import multiprocessing

from steadfast.parallel.fixed_point import FixedPoint
from steadfast.storage import LocalStore
from tests.benchmarks.commands import app_under_torchrun, write_config
from tests.benchmarks.speed import CASES, Case
from tests.benchmarks.statistics import estimate, table, verdict
from tests.support.history import read_ledger

_CHECK_EVERY = 10  # steps, so that many are checked in a short time
_MOST = 1.0  # of a step, that a check may add to it: 1 % at one step in a hundred
_CPU = torch.device("cpu")


def audit(case: Case, num_checks: int, folder: Path) -> list[str]:
    """Return a row: what a check adds to its step, beside the steps around it, and what that is at one in a hundred."""
    num_steps = _CHECK_EVERY * (num_checks + 2)
    config = write_config(
        folder / "audit.yaml",
        run={"storage": str(folder / "runs"), "name": "audit", "steps": num_steps, "exact": True, "report": False},
        **case.sections(),
        checkpoint={"node_memory": False},
        audit={"recompute": f"{_CHECK_EVERY} steps"},
    )
    subprocess.run([sys.executable, *app_under_torchrun(config)], check=True, stdout=subprocess.DEVNULL, timeout=1200)
    step_s = {line["step"]: line["step_s"] for line in read_ledger(LocalStore(folder / "runs" / "audit")).lines}
    added: list[float] = []
    for step in range(2 * _CHECK_EVERY, num_steps, _CHECK_EVERY):
        around = median(step_s[other] for other in range(step - 4, step + 5) if other != step)
        added.append((step_s[step] - around) / around)
    usual_ms = 1e3 * median(step_s.values())
    found = estimate(added)
    share = f"{found.median:.1%} [{found.low:.1%}, {found.high:.1%}]"
    return [case.name, f"{usual_ms:.1f}", share, f"{found.median / 100:.2%}", verdict(estimate(added), _MOST)]


def parts(num_elements: int) -> list[list[str]]:
    """Return a row for each piece, of one thread, and of two processes for the sums."""
    torch.set_num_threads(1)
    fixed = FixedPoint(8, _CPU)
    kept = torch.randn(num_elements)
    gradient = kept.clone()
    total = fixed.empty(gradient)

    def add(first: bool) -> None:
        fixed.add(total, gradient.copy_(kept), first)

    copy_ms = _milliseconds(lambda: gradient.copy_(kept))
    rows = [
        ["the first gradient of a step becomes integers", f"{_milliseconds(lambda: add(True)) - copy_ms:.1f}"],
        ["a further one is added", f"{_milliseconds(lambda: add(False)) - copy_ms:.1f}"],
        ["the sum becomes a gradient", f"{_milliseconds(lambda: fixed.store(total, gradient)):.1f}"],
    ]
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_sum_over_two, (num_elements, folder), 2)
        for name in ("float32", "int64"):
            rows.append([f"{name} summed over two ranks", (Path(folder) / name).read_text()])
    return rows


def _sum_over_two(rank: int, num_elements: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for dtype in (torch.float32, torch.int64):
        tensor = torch.zeros(num_elements, dtype=dtype)
        milliseconds = _milliseconds(lambda tensor=tensor: dist.all_reduce(tensor))  # type: ignore[misc]
        if not rank:
            (Path(folder) / str(dtype).removeprefix("torch.")).write_text(f"{milliseconds:.1f}")
    dist.destroy_process_group()


def _milliseconds(act: Callable[[], object], times: int = 15) -> float:
    seconds = []
    for _ in range(times):
        began_s = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - began_s)
    return 1e3 * median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checks", type=int, default=20)
    parser.add_argument("--parts", action="store_true", help="time the pieces instead")
    options = parser.parse_args()
    case = CASES["10m"]
    if options.parts:
        print(table([["piece", "ms"], *parts(case.num_params)]))
        return
    titles = ["model", "usual ms/step", "a check adds to its step [95 %]", "every 100 steps", "verdict"]
    with tempfile.TemporaryDirectory(prefix="exact-") as folder:
        print(table([titles, audit(case, options.checks, Path(folder))]))


if __name__ == "__main__":
    main()
