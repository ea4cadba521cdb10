"""Trackers of figures: protocol and builders."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from threading import Lock, Thread
from typing import Any, Protocol

from steadfast.config import Config, Target, TensorBoardConfig, TrackerConfig, WandbConfig, dump_config
from steadfast.config.target import bind_target
from steadfast.data.extras import require_extra
from steadfast.errors import ConfigError
from steadfast.run.events import Log, Validation
from steadfast.storage import Store
from steadfast.telemetry.background import Background
from steadfast.telemetry.media import Pixels, is_image, pixels_of, table_of
from steadfast.telemetry.mlflow import MlflowTracker, tracking_uri
from steadfast.telemetry.past import Past
from steadfast.telemetry.spool import Spool
from steadfast.telemetry.tensorboard import TensorBoardTracker
from steadfast.telemetry.wandb import WandbTracker

_log = logging.getLogger(__name__)

# W&B opens a run only once in a process, and an attempt asks MLflow for the last figures of the attempt before, which
# may still be closing on a thread.
_TURNS = {"wandb": Lock(), "mlflow": Lock()}


class Tracker(Protocol):
    """Destination of metrics.

    Every tracker is called on a background thread of its own, so its calls may take time.
    """

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Store one number for each tag."""
        ...

    def histogram(self, step: int, tag: str, values: Sequence[float]) -> None:
        """Store the distribution of many numbers."""
        ...

    def text(self, step: int, tag: str, text: str) -> None:
        """Store a text of several lines. A tracker of the user may lack this method."""
        ...

    def image(self, step: int, tag: str, pixels: Pixels) -> None:
        """Store an image, (height, width, 1 or 3). A tracker of the user may lack this method."""
        ...

    def close(self) -> None:
        """Write pending values and close the tracker."""
        ...


class BackgroundTracker:
    """Calls a tracker on a background thread.

    The tracker may be slow, raise or hang without an effect on training.

    Args:
        name: name of the tracker in warnings.
        build: returns the tracker. It is called on the background thread too, because some libraries tie a run to the
            thread that opened it, and importing or opening one may take seconds.
        spool: folder for the tracker's files and for the note of what the tracker has drawn.
        turn: lock that is held while the tracker is open.
    """

    def __init__(
        self, name: str, build: Callable[[], Any], spool: Spool, turn: AbstractContextManager[object] | None = None
    ) -> None:
        self._build = build
        self._spool = spool
        self._turn = turn or nullcontext()
        self._tracker: Any = None
        self._opened = ExitStack()
        self._opened.callback(spool.close)
        self._background = Background(name)
        self._background.submit(self._open)

    def _open(self) -> None:
        self._opened.enter_context(self._turn)
        self._tracker = self._build()
        self._opened.callback(self._tracker.close)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._background.submit(lambda: self._draw(step, values))

    def resend(self, step: int, values: dict[str, float]) -> None:
        """Store the numbers unless an earlier attempt has stored them."""
        self._background.submit(lambda: self._spool.make_up(step, values, self._draw))

    def _draw(self, step: int, values: dict[str, float]) -> None:
        self._tracker.scalars(step, values)
        self._spool.note(step, values)
        self._spool.upload_if_due()

    def histogram(self, step: int, tag: str, values: Sequence[float]) -> None:
        self._background.submit(lambda: self._tracker.histogram(step, tag, values))

    def text(self, step: int, tag: str, text: str) -> None:
        self._submit("text", step, tag, text)

    def image(self, step: int, tag: str, pixels: Pixels) -> None:
        self._submit("image", step, tag, pixels)

    def _submit(self, method: str, *arguments: Any) -> None:
        def call() -> None:
            if hasattr(self._tracker, method):
                getattr(self._tracker, method)(*arguments)
                self._spool.upload_if_due()

        self._background.submit(call)

    def close(self) -> None:
        # Whatever was opened is closed after an error too: the next attempt may wait for its turn.
        self._background.close(self._opened.close)


class Trackers:
    """All trackers of an attempt, possibly none, which also store the text of the configuration."""

    def __init__(self, trackers: Sequence[BackgroundTracker], configuration: str = "") -> None:
        self._trackers = list(trackers)
        self._configuration = configuration

    def record(self, event: Log | Validation) -> None:
        """Store an event's figures as `train/…`, `speed/…` and `validation/…`."""
        self.scalars(event.step, event.figures())

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Store a hook's values: numbers, texts, images, and tables as lists of dictionaries.

        Raises TrainingError if a value is none of these.
        """
        if not self._trackers:
            return
        numbers: dict[str, float] = {}
        for tag, value in values.items():
            if isinstance(value, str):
                self.text(step, tag, value)
            elif isinstance(value, list | tuple):
                self.text(step, tag, table_of(value, tag))
            elif is_image(value):
                pixels = pixels_of(value, tag)
                for tracker in self._trackers:
                    tracker.image(step, tag, pixels)
            else:
                numbers[tag] = float(value)
        if numbers:
            self.scalars(step, numbers)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        for tracker in self._trackers:
            tracker.scalars(step, values)

    def histogram(self, step: int, tag: str, values: Sequence[float]) -> None:
        for tracker in self._trackers:
            tracker.histogram(step, tag, values)

    def text(self, step: int, tag: str, text: str) -> None:
        for tracker in self._trackers:
            tracker.text(step, tag, text)

    def begin(self, step: int, past: Past, figures: Sequence[Log | Validation] = ()) -> None:
        """Store configuration and interruptions of the run, before an attempt's first step.

        Args:
            figures: newest figures of earlier attempts, which a killed leader may not have sent.
        """
        for event in figures:
            for tracker in self._trackers:
                tracker.resend(event.step, event.figures())
        self.text(step, "configuration", self._configuration)
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
        """Close the trackers of a failed attempt on another thread.

        The next attempt does not wait for a slow service.
        """
        # This is no daemon thread, so a process that ends waits until the last figures are written.
        if self._trackers:
            Thread(target=self.close, name="trackers").start()


def build_trackers(run: Config, store: Store, first_step: int) -> Trackers:
    """Build the trackers of one attempt.

    Args:
        run: the configuration of the run.
        store: the run directory, in which each tracker has a folder.
        first_step: the first step of the attempt.

    Raises:
        ConfigError: a tracker of the user cannot be loaded, or does not take its arguments.
    """
    public = run.replace("cluster.env", {})  # the variables may hold secrets
    trackers: list[BackgroundTracker] = []
    for config in run.trackers:
        try:
            trackers.append(_build(config, public, store, first_step))
        # A wrong name or argument ends the run, because the next attempt would fail in the same way. A full disk only
        # turns the tracker off.
        except ConfigError:
            raise
        except Exception as error:
            name = getattr(config, "target", config.kind)
            _log.warning("%s is off until the next attempt, training goes on: %s", name, error)
    return Trackers(trackers, dump_config(public))


def _build(config: TrackerConfig, run: Config, store: Store, first_step: int) -> BackgroundTracker:
    if isinstance(config, TensorBoardConfig):
        spool = Spool(store, "tensorboard")
        return BackgroundTracker("TensorBoard", partial(TensorBoardTracker, spool.path, first_step), spool)
    if isinstance(config, Target):
        build = bind_target(config, "trackers", location=store.uri, first_step=first_step)
        return BackgroundTracker(config.target, build, Spool(store, f"trackers/{config.target}"))
    require_extra(config.kind, config.kind, "trackers.kind")
    document, turn = run.model_dump(mode="json"), _TURNS[config.kind]
    if isinstance(config, WandbConfig):
        spool = Spool(store, config.kind)
        build = partial(WandbTracker, config, run.run.name, document, store, spool.path)
        return BackgroundTracker("Weights & Biases", build, spool, turn)
    build = partial(MlflowTracker, config, tracking_uri(config, store), run.run.name, document, store)
    return BackgroundTracker("MLflow", build, Spool(store, config.kind), turn)
