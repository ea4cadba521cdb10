"""Where the time between two attempts goes."""

import time

from app.run.directory import RunDirectory
from app.run.events import AttemptStarted, RunStarted


class StartupTimer:
    """Takes the seconds of each phase of an attempt's start."""

    def __init__(self) -> None:
        # Wall time, since one phase begins in another process, which wrote down when.
        self._seconds = {"detected_s": 0.0}
        self._began_s = time.time()
        self._marked_s = self._began_s

    def mark(self, phase: str) -> None:
        """End the phase that began with the last mark."""
        now_s = time.time()
        self._seconds[f"{phase}_s"] = round(now_s - self._marked_s, 4)
        self._marked_s = now_s

    def event(self, step: int, source: str, world_size: int) -> AttemptStarted:
        """Return what there is to tell of an attempt that began with the state of `step`."""
        return AttemptStarted(step=step, source=source, world_size=world_size, **self._seconds)

    def measure_detection(self, directory: RunDirectory) -> None:
        """Take the time from the end of progress to the beginning of this start. Before the attempt writes a step."""
        # Progress ended at the former attempt's last step, or has never begun since the command was given.
        ended_s = float(directory.last_step_line().get("time_s", 0.0))
        for started in directory.events(RunStarted):
            if not started.again:  # or it is a part of what the former attempt's failure costs
                ended_s = max(ended_s, started.time_s or 0.0)
        self._seconds["detected_s"] = round(self._began_s - (ended_s or self._began_s), 4)
