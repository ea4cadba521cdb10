"""What a check by recomputation adds to a step of an exact run; sides.py has what exactness itself costs.

python -m tests.benchmarks.exact --checks 20

A check has one microbatch computed twice, in every tenth step of a run; these steps are compared with those around
them.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from steadfast.storage import LocalStore
from tests.benchmarks.commands import app_under_torchrun, write_config
from tests.benchmarks.speed import CASES, Case
from tests.benchmarks.statistics import estimate, table, verdict
from tests.support.history import read_ledger

_CHECK_EVERY = 10  # steps, so that many are checked in a short time
_MOST = 1.0  # of a step, that a check may add to it: 1 % at one step in a hundred


def audit(case: Case, num_checks: int, folder: Path) -> list[str]:
    """Return a row: what a check adds to its step, beside the steps around it, and what that is at one in a hundred."""
    num_steps = _CHECK_EVERY * (num_checks + 2)
    config = write_config(
        folder / "audit.yaml",
        run={"storage": str(folder / "runs"), "name": "audit", "steps": num_steps, "exact": True, "report": False},
        **case.sections(),
        checkpoint={"node_memory": False},
        recompute={"every": f"{_CHECK_EVERY} steps"},
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checks", type=int, default=20)
    options = parser.parse_args()
    titles = ["model", "usual ms/step", "a check adds to its step [95 %]", "every 100 steps", "verdict"]
    with tempfile.TemporaryDirectory(prefix="exact-") as folder:
        print(table([titles, audit(CASES["10m"], options.checks, Path(folder))]))


if __name__ == "__main__":
    main()
