"""A run's figures among Ray's own metrics, so that its dashboard, and a Prometheus that is there, show them."""

import time

from ray.util.metrics import Gauge

from app.run.events import AttemptEnded, AttemptStarted, Event, Log

_MEANINGS = {
    "step": "Optimizer steps that are done.",
    "loss": "Loss of the last step that was logged, mean over the global batch.",
    "samples_per_s": "Samples trained on a second, of all workers together.",
    "world_size": "Workers that train; 0 between two attempts.",
    "goodput": "Share of the time in steps that were not done before, 0 to 1.",
}


class Gauges:
    """Shows what events say of the run. It costs the workers nothing, which send these events anyway."""

    def __init__(self, run: str) -> None:
        self._began_s = time.time()
        self._furthest_step: int | None = None  # None before the first figures, which say nothing of a duration
        self._productive_s = 0.0
        self._gauges: dict[str, Gauge] = {}
        for name, meaning in _MEANINGS.items():
            gauge = Gauge(f"steadfast_{name}", meaning, tag_keys=("run",))
            gauge.set_default_tags({"run": run})
            self._gauges[name] = gauge

    def observe(self, event: Event) -> None:
        """Follow the run."""
        match event:
            case Log():
                self._show(step=event.step, loss=event.loss, samples_per_s=event.samples_per_s)
                self._show(world_size=event.world_size, goodput=self._goodput(event))
            case AttemptStarted():
                self._show(world_size=event.world_size)
            case AttemptEnded():
                self._show(world_size=0, samples_per_s=0)

    def _show(self, **values: float) -> None:
        for name, value in values.items():
            self._gauges[name].set(value)

    def _goodput(self, log: Log) -> float:
        """Return an estimate from the figures that are shown; the exact one, of the whole run, is in its summary."""
        # A coordinator that takes over knows nothing of the time before it.
        before = log.step if self._furthest_step is None else self._furthest_step
        self._productive_s += max(0, log.step - before) * log.step_ms / 1e3
        self._furthest_step = max(before, log.step)
        now_s = log.time_s or time.time()
        return min(1.0, self._productive_s / max(now_s - self._began_s, 1e-9))
