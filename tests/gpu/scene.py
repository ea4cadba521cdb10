"""What a drill is given, and how it tells what it has found. Needs nothing but Python."""

import json
from dataclasses import dataclass, field
from pathlib import Path

Figure = float | int | str | list[float]
FIGURES = "figures.json"


class Skip(Exception):
    """A drill cannot be run here. The message is the reason, for the table."""


@dataclass
class Scene:
    """A drill's device, its empty folder, and its findings so far, which are on disk at every moment.

    Attributes:
        device: "cuda", or "cpu" for a rehearsal of the drill's own code over gloo.
        folder: for whatever the drill leaves; folders of other drills lie beside it.
    """

    device: str
    folder: Path
    figures: dict[str, Figure] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def figure(self, **figures: Figure) -> None:
        """Keep figures by name; units are in the names."""
        for name, value in figures.items():
            self.figures[name] = round(value, 4) if isinstance(value, float) else value
        self._write()

    def check(self, holds: bool, claim: str) -> None:
        """Fail the drill unless the claim holds. The drill goes on, so that it tells all that is wrong."""
        if not holds:
            self.failures.append(claim)
            self._write()

    def check_on_gpu(self, holds: bool, claim: str) -> None:
        """Check a claim on speed or device memory. In a rehearsal it says nothing, so it is not checked there."""
        if self.on_gpu:
            self.check(holds, claim)

    def _write(self) -> None:
        found = {"figures": self.figures, "failures": self.failures}
        (self.folder / FIGURES).write_text(json.dumps(found))
