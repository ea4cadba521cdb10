"""A tracker of one's own: every figure as a line of JSON, in a file beside the run's others."""

import json
import math
from collections.abc import Sequence
from pathlib import Path


class JsonLines:
    """`trackers: [{target: "tests.examples.json_lines:JsonLines", args: {file: figures.jsonl}}]`"""

    def __init__(self, location: str, first_step: int, file: str = "figures.jsonl") -> None:
        """
        Args:
            location: of the run directory, here a path.
            first_step: with which the attempt begins; lines from it on are of steps that are done again.
        """
        path = Path(location) / file
        earlier = path.read_text().splitlines(keepends=True) if path.exists() else []
        path.write_text("".join(line for line in earlier if json.loads(line)["step"] < first_step))
        self._file = path.open("a")

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()  # what a killed leader had written is there

    def histogram(self, step: int, tag: str, values: Sequence[float]) -> None:
        self.scalars(step, {f"{tag}/min": min(values), f"{tag}/max": max(values), f"{tag}/norm": math.hypot(*values)})

    def close(self) -> None:
        self._file.close()
