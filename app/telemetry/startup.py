"""Timer for the phases between two attempts."""

import time

from app.run.directory import RunDirectory
from app.run.events import AttemptStarted, RunStarted


class StartupTimer:
    """Measures the seconds of each phase of an attempt's start."""

    def __init__(self) -> None:
        # Wall time, since the phase "detected" began at a Unix time that another process recorded.
        self._seconds = {"detected_s": 0.0}
        self._began_s = time.time()
        self._marked_s = self._began_s

    def mark(self, phase: str) -> None:
        """Record the seconds since the last mark under the name `phase`."""
        now_s = time.time()
        self._seconds[f"{phase}_s"] = round(now_s - self._marked_s, 4)
        self._marked_s = now_s

    def event(self, step: int, source: str, world_size: int) -> AttemptStarted:
        """Return the event for an attempt that started from the state of `step`."""
        return AttemptStarted(step=step, source=source, world_size=world_size, **self._seconds)

    def measure_detection(self, directory: RunDirectory) -> None:
        """Measure the time from the last progress to the start of this attempt.

        Call this before the attempt writes a step.
        """
        # Progress ended at the last step in the ledger, or when the command began if the command finished no step.
        ended_s = float(directory.last_step_line().get("time_s", 0.0))
        for started in directory.events(RunStarted):
            if not started.again:  # the time before a restart of the command is part of the cost of the failure
                ended_s = max(ended_s, started.time_s or 0.0)
        self._seconds["detected_s"] = round(self._began_s - (ended_s or self._began_s), 4)
