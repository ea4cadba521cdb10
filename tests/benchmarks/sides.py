"""The app with something on beside the app without it, and without it again for the A/A control, in turns."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.benchmarks.commands import app_under_torchrun, write_config
from tests.benchmarks.speed import Case, app_sections, take_turns

LIMIT = 1.01  # of the time without it
COLUMNS = ["with ms/step", "without", "ratio [95 %]", "A/A [95 %]", "verdict"]


def take_sides(
    case: Case, num_pairs: int, steps_per_block: int, folder: Path, on: Mapping[str, Any], off: Mapping[str, Any]
) -> dict[str, list[float]]:
    """Return the seconds of each turn by side: "with", "without" and "control".

    Args:
        on: what is added to the configuration of the first side; to both others `off` is.
    """
    case = replace(case, steps_per_block=steps_per_block)
    num_blocks = num_pairs + 1
    commands = {}
    for side in ("with", "without", "control"):
        sections = app_sections(case, side, num_blocks, folder, **(on if side == "with" else off))
        commands[side] = app_under_torchrun(write_config(folder / f"{side}.yaml", **sections))
    return take_turns(commands, num_blocks, folder)
