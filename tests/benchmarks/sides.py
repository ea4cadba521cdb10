"""The app with something on beside the app without it, and without it again for the A/A control, in turns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.commands import app_under_torchrun, write_config
from tests.benchmarks.speed import Case, take_turns
from tests.benchmarks.statistics import paired_ratio, verdict

LIMIT = 1.01  # of the time without it
COLUMNS = ["with ms/step", "without", "ratio [95 %]", "A/A [95 %]", "verdict"]


def take_sides(
    case: Case, num_pairs: int, steps_per_block: int, folder: Path, on: Mapping[str, Any], off: Mapping[str, Any]
) -> dict[str, list[float]]:
    """Return the seconds of each turn by side: "with", "without" and "control".

    Args:
        on: what is added to the configuration of the first side; to both others `off` is.
    """
    num_blocks = num_pairs + 1
    commands = {}
    for side in ("with", "without", "control"):
        sections: dict[str, Any] = {
            "run": {
                "storage": str(folder / "runs"),
                "name": side,
                "steps": num_blocks * steps_per_block + 1,
                "report": False,
            },
            "batch": {"global_size": case.global_size, "microbatch_size": case.microbatch_size},
            "model": {"kind": "gpt", **case.model},
            "data": {"kind": "text", "context_length": case.model["context_length"], "validation_fraction": 0.0},
            "schedule": {"kind": "cosine", "warmup_steps": 1},
            "task": {
                "target": "tests.benchmarks.turns:TurnTakingTask",
                "args": {
                    "folder": str(folder),
                    "num_forwards": case.num_forwards(),
                    "steps_per_block": steps_per_block,
                    "num_blocks": num_blocks,
                    "side": side,
                },
            },
        }
        for key, section in (on if side == "with" else off).items():
            sections[key] = {**sections.get(key, {}), **section} if isinstance(section, Mapping) else section
        commands[side] = app_under_torchrun(write_config(folder / f"{side}.yaml", **sections))
    return take_turns(commands, num_blocks, folder)


def cells(seconds: Mapping[str, list[float]], steps_per_block: int, limit: float = LIMIT) -> list[str]:
    """Return what stands below `COLUMNS`; `limit` is of the time without it."""
    ratio = paired_ratio(seconds["with"], seconds["without"])
    return [
        *[f"{1e3 * median(seconds[side]) / steps_per_block:.1f}" for side in ("with", "without")],
        str(ratio),
        str(paired_ratio(seconds["without"], seconds["control"])),
        verdict(ratio, limit),
    ]
