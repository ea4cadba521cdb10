"""Where the time between two attempts goes."""

from __future__ import annotations

import time

from app.files import last_line
from app.rundir import RunDirectory


class Phases:
    """Seconds by phase, in order. `detected_s` begins when progress ended: at the former attempt's last step, or at
    the command."""

    def __init__(self, directory: RunDirectory) -> None:
        self.seconds: dict[str, float] = {}
        last = last_line(directory.ledger) or {}
        started = [each["time_s"] for each in directory.read_events() if each["event"] == "run_started"]
        self._marked = max(last.get("time_s", 0.0), *started[-1:], 0.0) or time.time()
        self.mark("detected")

    def mark(self, name: str) -> None:
        now = time.time()
        self.seconds[f"{name}_s"] = round(now - self._marked, 4)
        self._marked = now
