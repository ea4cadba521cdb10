"""Where figures are kept: what a tracker must do, all trackers of an attempt, and a twin in memory for tests."""

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any, Protocol

from app.config import Config, TensorBoardConfig, WandbConfig, dump_config
from app.config.target import bind_target
from app.errors import ConfigError
from app.run.events import Log, Validation
from app.storage import Store
from app.telemetry.background import Background
from app.telemetry.past import Past
from app.telemetry.tensorboard import TensorBoardTracker
from app.telemetry.wandb import WandbTracker

_log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Destination of metrics. Calls of a user's tracker run on a thread of its own, the others return at once."""

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Keep one number for each tag."""
        ...

    def histogram(self, step: int, tag: str, values: Sequence[float]) -> None:
        """Keep the distribution of many numbers."""
        ...

    def text(self, step: int, tag: str, text: str) -> None:
        """Keep some lines. One of the user's own need not have this."""
        ...

    def close(self) -> None:
        """Write what is pending and close."""
        ...


class OwnTracker:
    """Tracker of the user, called on a thread beside training because it may be slow, raise or hang.

    Args:
        build: returns the tracker. Called on that thread too, since some libraries know a run by the thread.
    """

    def __init__(self, name: str, build: Callable[[], Any]) -> None:
        self._build = build
        self._tracker: Any = None
        self._background = Background(name)
        self._background.submit(self._open)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._background.submit(lambda: self._tracker.scalars(step, values))

    def histogram(self, step: int, tag: str, values: Sequence[float]) -> None:
        self._background.submit(lambda: self._tracker.histogram(step, tag, values))

    def text(self, step: int, tag: str, text: str) -> None:
        def call() -> None:
            if hasattr(self._tracker, "text"):
                self._tracker.text(step, tag, text)

        self._background.submit(call)

    def close(self) -> None:
        self._background.close(self._end)

    def _open(self) -> None:
        self._tracker = self._build()

    def _end(self) -> None:
        if self._tracker is not None:
            self._tracker.close()


class MemoryTracker:
    """The twin for tests: `values[tag][step]`, `histograms[tag][step]` and `texts[tag][step]`."""

    def __init__(self) -> None:
        self.values: defaultdict[str, dict[int, float]] = defaultdict(dict)
        self.histograms: defaultdict[str, dict[int, list[float]]] = defaultdict(dict)
        self.texts: defaultdict[str, dict[int, str]] = defaultdict(dict)
        self.closed = False

    def scalars(self, step: int, values: dict[str, float]) -> None:
        for tag, value in values.items():
            self.values[tag][step] = value

    def histogram(self, step: int, tag: str, values: Sequence[float]) -> None:
        self.histograms[tag][step] = list(values)

    def text(self, step: int, tag: str, text: str) -> None:
        self.texts[tag][step] = text

    def close(self) -> None:
        self.closed = True


class Trackers:
    """All trackers of an attempt; there may be none."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def record(self, event: Log | Validation) -> None:
        """Keep an event's figures as `train/…`, `speed/…` and `validation/…`."""
        self.scalars(event.step, event.figures())

    def scalars(self, step: int, values: dict[str, float]) -> None:
        for tracker in self._trackers:
            tracker.scalars(step, values)

    def histogram(self, step: int, tag: str, values: Sequence[float]) -> None:
        for tracker in self._trackers:
            tracker.histogram(step, tag, values)

    def text(self, step: int, tag: str, text: str) -> None:
        for tracker in self._trackers:
            tracker.text(step, tag, text)

    def begin(self, config: Config, step: int, past: Past) -> None:
        """Keep what the run is trained with, and what has interrupted it, before the first step of an attempt."""
        public = config.model_copy(update={"cluster": config.cluster.model_copy(update={"env": {}})})
        self.text(step, "configuration", dump_config(public))
        counts: dict[str, float] = {
            "events/failures": past.num_failures,
            "events/resizes": past.num_resizes,
            "events/restarts": past.num_restarts,
        }
        self.scalars(step, counts)
        if past.interruptions:
            self.text(step, "events", "\n".join(past.interruptions))

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()

    def leave(self) -> None:
        """Close them on a thread beside: the attempt has failed, and the next one waits for no service."""
        if self._trackers:
            Thread(target=self.close, name="trackers").start()


def build_trackers(run: Config, store: Store, first_step: int) -> Trackers:
    """Return one attempt's trackers, each in its folder of the run directory; the attempt begins with `first_step`."""
    trackers: list[Tracker] = []
    for config in run.trackers:
        try:
            if isinstance(config, TensorBoardConfig):
                trackers.append(TensorBoardTracker(store, first_step))
            elif isinstance(config, WandbConfig):
                trackers.append(WandbTracker(config, run, store))
            else:
                arguments = {"location": store.uri, "first_step": first_step, **config.args}
                trackers.append(OwnTracker(config.target, bind_target(config.target, arguments, "trackers")))
        # A wrong name or argument ends the run, since it will be as wrong next time; a service out of reach does not.
        except ConfigError:
            raise
        except Exception as error:
            _warn(getattr(config, "target", config.kind), error)
    return Trackers(trackers)


def _warn(name: str, error: Exception) -> None:
    _log.warning("%s is off until the next attempt, training goes on: %s", name, error)
