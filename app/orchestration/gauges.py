"""Export a run's figures as Ray metrics, for Ray's dashboard and Prometheus."""

import time

from ray.util.metrics import Gauge

from app.run.events import AttemptEnded, AttemptStarted, Event, Log

_MEANINGS = {
    "step": "Number of finished optimizer steps.",
    "loss": "Loss of the last logged step, mean over the global batch.",
    "samples_per_s": "Samples that all workers together train on per second.",
    "world_size": "Number of training workers; 0 between two attempts.",
    "goodput": "Share of the time that was spent in steps not done before, 0 to 1.",
}


class Gauges:
    """Gauges that follow the events of a run."""

    def __init__(self, run: str) -> None:
        self._began_s = time.time()
        self._furthest_step: int | None = None  # None before the first log event, which gives no duration
        self._productive_s = 0.0
        self._gauges: dict[str, Gauge] = {}
        for name, meaning in _MEANINGS.items():
            gauge = Gauge(f"steadfast_{name}", meaning, tag_keys=("run",))
            gauge.set_default_tags({"run": run})
            self._gauges[name] = gauge

    def observe(self, event: Event) -> None:
        """Update the gauges with an event of the run."""
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
        """Return an estimate of the goodput from log events.

        The run's summary holds the exact goodput of the whole run.
        """
        # A coordinator that takes over does not know the time before the takeover, so it counts from its first log.
        before = log.step if self._furthest_step is None else self._furthest_step
        self._productive_s += max(0, log.step - before) * log.step_ms / 1e3
        self._furthest_step = max(before, log.step)
        now_s = log.time_s or time.time()
        return min(1.0, self._productive_s / max(now_s - self._began_s, 1e-9))
