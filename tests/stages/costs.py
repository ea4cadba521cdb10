"""Write `costs.md` from the last whole run of each stage in this checkout: `python -m tests.stages.costs`."""

import json
import os
from pathlib import Path

from tests.stages.record import Stage, clock, load

PAGE = Path(__file__).with_name("costs.md")
_DEAR_S = 3.0


def page(stages: list[Stage]) -> str:
    lines = [
        "# What the tests cost",
        "",
        f"Written by `python -m tests.stages.costs` from the last whole run of each stage, on {os.cpu_count()} cores.",
        "CPU seconds are those of all processes that a test starts. Busy cores are CPU seconds over wall seconds.",
        "",
        "| stage | tests | wall | CPU s of the tests | busy cores per test |",
        "|---|---|---|---|---|",
    ]
    dear = []
    for stage in stages:
        rows = [json.loads(line) for line in stage.record.read_text().splitlines()]
        wall_s, cpu_s = (sum(row[key] for row in rows) for key in ("wall_s", "cpu_s"))
        whole = clock(stage.last_wall_s() or 0.0)
        lines.append(f"| {stage.name} | {len(rows)} | {whole} | {cpu_s:.0f} | {cpu_s / wall_s:.2f} |")
        dear += [(row["cpu_s"], row["wall_s"], row["test"]) for row in rows if row["cpu_s"] >= _DEAR_S]
    lines += ["", f"Tests of {_DEAR_S:g} CPU seconds and more:", "", "| CPU s | wall s | test |", "|---|---|---|"]
    lines += [f"| {cpu_s:.1f} | {wall_s:.1f} | `{test}` |" for cpu_s, wall_s, test in sorted(dear, reverse=True)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page([stage for stage in load().values() if stage.record.exists()]))
