"""Stages as `stages.toml` states them, and figures of their last runs in this checkout."""

import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("stages.toml")
FOLDER = ROOT / ".stages"  # of this checkout; git ignores the folder
PROGRESS = FOLDER / "progress.txt"


@dataclass(frozen=True)
class Stage:
    """One call of pytest.

    Attributes:
        name: of the stage.
        what: the stage has, in a few words.
        words: arguments of pytest.
        jobs: test processes at a time.
        wall_s: duration on two quiet cores.
        cpu_s: CPU seconds of all processes there, without the margin of the budget.
    """

    name: str
    what: str
    words: str
    jobs: int
    wall_s: float
    cpu_s: float

    @property
    def record(self) -> Path:
        """File with a line for each test of the last whole run."""
        return FOLDER / f"{self.name}.jsonl"

    def last_wall_s(self) -> float | None:
        """Return the duration of the last whole run here."""
        try:
            return float(json.loads((FOLDER / "walls.json").read_text())[self.name])
        except (OSError, ValueError, KeyError):
            return None

    def expected_s(self) -> float:
        return self.last_wall_s() or self.wall_s

    def test_walls_s(self) -> dict[str, float]:
        """Return the duration of each test in the last whole run here."""
        try:
            lines = self.record.read_text().splitlines()
        except OSError:
            return {}
        return {row["test"]: row["wall_s"] for row in map(json.loads, lines)}

    def keep(self, wall_s: float, rows: Iterable[dict[str, Any]]) -> None:
        """Record a whole run."""
        FOLDER.mkdir(exist_ok=True)
        self.record.write_text("".join(json.dumps(row) + "\n" for row in rows))
        try:
            walls = json.loads((FOLDER / "walls.json").read_text())
        except (OSError, ValueError):
            walls = {}
        (FOLDER / "walls.json").write_text(json.dumps(walls | {self.name: wall_s}))


def load() -> dict[str, Stage]:
    """Return the stages of `stages.toml` by name."""
    return {name: Stage(name=name, **fields) for name, fields in _table()["stages"].items()}


def group(name: str) -> list[Stage]:
    """Return the stages of a target of `make`, in order. A stage is a group of its own."""
    stages = load()
    return [stages[each] for each in _table()["groups"].get(name, [name])]


def budget() -> dict[str, float]:
    """Return what a budget is made of: `margin`, and `loop_s` of the machine on which `cpu_s` was measured."""
    found: dict[str, float] = _table()["budget"]
    return found


def clock(seconds: float) -> str:
    """Return minutes and seconds: 3:07."""
    return f"{round(seconds) // 60}:{round(seconds) % 60:02}"


def _table() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text())
