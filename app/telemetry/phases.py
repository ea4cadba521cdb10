"""Where the time between two attempts goes."""

from __future__ import annotations

import time

from app.rundir import RunDirectory


class Phases:
    """Seconds by phase, in order."""

    def __init__(self) -> None:
        self.seconds = {"detected_s": 0.0}
        self._began = self._marked = time.time()

    def mark(self, name: str) -> None:
        now = time.time()
        self.seconds[f"{name}_s"] = round(now - self._marked, 4)
        self._marked = now

    def look_back(self, directory: RunDirectory) -> None:
        """`detected_s` begins when progress ended: at the former attempt's last step, or at the command. Before this
        attempt writes a step."""
        last = directory.last_step_line() or {}
        started = [each["time_s"] for each in directory.read_events() if each["event"] == "run_started"]
        ended = max(last.get("time_s", 0.0), *started[-1:], 0.0) or self._began
        self.seconds["detected_s"] = round(self._began - ended, 4)
