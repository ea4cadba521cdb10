"""What the last steps were like: the figures of one log line."""

import time
from collections.abc import Callable
from statistics import median

from app.telemetry.throughput import mfu


class Meters:
    """Gathers steps between two log lines. One for each attempt, so no figure mixes two worlds.

    `flops_per_sample` counts forward and backward; `peak_flops_total` is that of all workers together.
    """

    def __init__(
        self,
        flops_per_sample: float | None = None,
        peak_flops_total: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._flops_per_sample = flops_per_sample
        self._peak_flops_total = peak_flops_total
        self._clock = clock
        self._window: list[tuple[float, int, int]] = []
        self._first_step_ended: float | None = None
        self._num_steps_since = 0

    def record(self, step_seconds: float, num_samples: int, units: int) -> None:
        """Add one step; `num_samples` and `units` (tokens, or samples) are the whole global batch's."""
        self._window.append((step_seconds, num_samples, units))
        if self._first_step_ended is None:  # it warms up caches and compilers: the eta leaves it out
            self._first_step_ended = self._clock()
        else:
            self._num_steps_since += 1

    def snapshot(self, remaining_steps: int) -> dict[str, float | None]:
        """The figures since the last snapshot, at least one step ago; a new window begins.

        The step time is a median, which a pause leaves alone; the rates are means, for a pause slows the run.
        """
        seconds, num_samples, units = zip(*self._window, strict=True)
        self._window = []
        samples_per_s = sum(num_samples) / sum(seconds)
        return {
            "step_ms": median(seconds) * 1e3,
            "units_per_s": sum(units) / sum(seconds),
            "samples_per_s": samples_per_s,
            "mfu": mfu(samples_per_s, self._flops_per_sample, self._peak_flops_total),
            "eta_s": remaining_steps * (self._wall_s_per_step() or median(seconds)),
        }

    def _wall_s_per_step(self) -> float | None:
        """By the clock, so that validation and checkpoints, which will come again, are foreseen too."""
        if self._first_step_ended is None or not self._num_steps_since:
            return None
        return (self._clock() - self._first_step_ended) / self._num_steps_since
