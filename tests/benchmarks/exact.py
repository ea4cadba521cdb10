"""What an exact run costs: the app with `run.exact` beside the app without, and what of it lies where.

python -m tests.benchmarks.exact --pairs 20
python -m tests.benchmarks.exact --pairs 20 --audit
python -m tests.benchmarks.exact --parts

Three of them take turns of some steps each (turns.py): exact, ordinary, and ordinary again, whose ratio to the second
one is the A/A control. `--audit` has one microbatch computed twice in every tenth step of a run, and compares these
steps with those around them. `--parts` times the pieces by themselves, in one process and between two: what the
gradient of a microbatch takes to become integers, the way back, and the sum over ranks of fp32 and of int64.
"""

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
from tests.benchmarks.commands import app_under_torchrun, parser_of_pairs, write_config
from tests.benchmarks.sides import COLUMNS, take_sides
from tests.benchmarks.speed import CASES, Case
from tests.benchmarks.statistics import compare_sides, estimate, table, verdict
from tests.support.history import read_ledger

LIMIT = 1.25  # of the time without it
_CHECK_EVERY = 10  # steps, so that many are checked in a short time
_MOST = 1.0  # of a step, that a check may add to it: 1 % at one step in a hundred
_CPU = torch.device("cpu")


def compare(case: Case, num_pairs: int, steps_per_block: int, folder: Path) -> list[str]:
    """One row of the table."""
    on, off = ({"run": {"exact": wanted}, "checkpoint": {"node_memory": False}} for wanted in (True, False))
    seconds = take_sides(case, num_pairs, steps_per_block, folder, on, off)
    return [case.name, f"{case.num_params / 1e6:.2f} M", *compare_sides(seconds, steps_per_block, LIMIT)]


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
    parser = parser_of_pairs(20)
    parser.add_argument("--steps", type=int, default=4, help="of a turn")
    parser.add_argument(
        "--audit", action="store_true", help="what recompute.every costs in an exact run, by so many checks as pairs"
    )
    parser.add_argument("--parts", action="store_true", help="time the pieces instead")
    options = parser.parse_args()
    case = CASES["10m"]
    if options.parts:
        print(table([["piece", "ms"], *parts(case.num_params)]))
        return
    with tempfile.TemporaryDirectory(prefix="exact-") as folder:
        if options.audit:
            titles = ["model", "usual ms/step", "a check adds to its step [95 %]", "every 100 steps", "verdict"]
            print(table([titles, audit(case, options.pairs, Path(folder))]))
            return
        row = compare(case, options.pairs, options.steps, Path(folder))
    print(table([["model", "parameters", *COLUMNS], row]))
    print(f"{options.pairs} pairs of {options.steps} steps; verdict: the interval reaches down to {LIMIT}")


if __name__ == "__main__":
    main()
