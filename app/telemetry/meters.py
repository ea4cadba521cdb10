"""What the last steps were like: the figures of one log line."""

from statistics import median


class Meters:
    """Gathers steps between two log lines. One for each attempt, so no figure mixes two worlds.

    `flops_per_sample` counts forward and backward; `peak_flops_total` is that of all workers together.
    """

    def __init__(self, flops_per_sample: float | None = None, peak_flops_total: float | None = None) -> None:
        self._flops_per_sample, self._peak_flops_total = flops_per_sample, peak_flops_total
        self._window: list[tuple[float, int, int]] = []

    def record(self, step_seconds: float, num_samples: int, units: int) -> None:
        """Add one step; `num_samples` and `units` (tokens, or samples) are the whole global batch's."""
        self._window.append((step_seconds, num_samples, units))

    def snapshot(self, remaining_steps: int) -> dict[str, float | None]:
        """The figures since the last snapshot, at least one step ago; a new window begins.

        The step time is a median, which a pause leaves alone; the rates are means, for a pause slows the run. `mfu` is
        0 to 1 (PaLM, arXiv:2204.02311, appendix B); recomputation is not counted.
        """
        seconds, num_samples, units = zip(*self._window, strict=True)
        self._window = []
        samples_per_s = sum(num_samples) / sum(seconds)
        known = self._flops_per_sample and self._peak_flops_total
        return {
            "step_ms": median(seconds) * 1e3,
            "units_per_s": sum(units) / sum(seconds),
            "samples_per_s": samples_per_s,
            "mfu": samples_per_s * self._flops_per_sample / self._peak_flops_total if known else None,
            "eta_s": remaining_steps * median(seconds),
        }
