"""What trackers may have lost of a run whose leader was killed."""

import json
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from tests.support.command import Running

MOMENT_S = 0.3  # before the kill: what a tracker that was killed had not written yet


def kill_rank(running: Running, rank: int) -> None:
    """Kill one of the processes that torchrun has started."""
    started = psutil.Process(running.process.pid).children()
    (process,) = [each for each in started if each.environ().get("RANK") == str(rank)]
    process.kill()


def check_curve(directory: Path, drawn: Mapping[int, float], num_steps: int, figure: str = "loss") -> None:
    """The figures are those of `metrics.jsonl`, for all steps but those of a moment before the first attempt's kill."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    killed_s = max(line["time_s"] for line in lines if line["attempt"] == 1)
    lost = [line["step"] for line in lines if line["attempt"] == 1 and line["time_s"] > killed_s - MOMENT_S]
    # Nobody has logged what was under way between ranks when one of them was killed.
    lost += range(lost[-1] + 1, lost[-1] + 1 + _steps_in(MOMENT_S, lines))
    missing = sorted(set(range(1, num_steps + 1)) - drawn.keys())
    assert set(missing) <= set(lost), f"missing: {missing}; may be: {lost}"
    logged = {line["step"]: line[figure] for line in lines}
    assert {step: drawn[step] for step in logged.keys() - set(missing)} == pytest.approx(
        {step: logged[step] for step in logged.keys() - set(missing)}, rel=1e-5
    )


def _steps_in(seconds: float, lines: list[dict[str, float]]) -> int:
    return int(seconds / min(line["step_ms"] / 1e3 for line in lines)) + 1
