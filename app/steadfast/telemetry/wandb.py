"""Tracker for Weights & Biases."""

import html
import importlib
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

from steadfast.config import WandbConfig
from steadfast.data.extras import require_extra
from steadfast.storage import Store
from steadfast.storage.documents import read_json, write_json
from steadfast.telemetry.background import Background
from steadfast.telemetry.media import Pixels
from steadfast.telemetry.spool import Spool

_FOLDER = "wandb"
_ID = f"{_FOLDER}/run.json"
_FLUSH_S = 0.1  # instead of fifteen seconds by default, because a killed leader loses unflushed figures

# Held while the run is open in this process, because W&B opens a run only once in a process. The run of a failed
# attempt is closed on a thread while the next attempt begins.
_open_here = threading.Lock()


class WandbTracker:
    """Draws all attempts of a run as one run of W&B.

    Resized and resumed runs continue the same W&B run. All calls to W&B are made on a background thread.
    """

    def __init__(self, config: WandbConfig, name: str, document: dict[str, Any], store: Store) -> None:
        """Open the W&B run `name`, with `document` as its configuration."""
        require_extra("wandb", "wandb", "trackers.kind")
        self._spool = Spool(store, _FOLDER)
        self._run: Any = None
        self._holds = False
        self._background = Background("Weights & Biases")
        # Opening the run takes a second or more. On the background thread it does not delay the first step.
        self._background.submit(lambda: self._open(config, name, document, store))

    def _open(self, config: WandbConfig, name: str, document: dict[str, Any], store: Store) -> None:
        self._wandb = importlib.import_module("wandb")
        self._holds = _open_here.acquire()
        self._spool.path.mkdir(parents=True, exist_ok=True)
        # W&B would otherwise print its own lines among those of the run, and send the worker's output to its service.
        settings = self._wandb.Settings(silent=True, console="off", x_transaction_log_flush_interval=_FLUSH_S)
        self._run = self._wandb.init(
            id=_id_of(store),
            resume="allow",
            # If the user's own code has a W&B run open, that run is neither used nor closed.
            reinit="create_new",
            project=config.project,
            entity=config.entity,
            name=name,
            config=document,
            mode=os.environ.get("WANDB_MODE") or self._mode(),
            dir=str(self._spool.path),
            settings=settings,
        )

    def _mode(self) -> str:
        return "online" if self._wandb.api.api_key else "offline"

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._background.submit(lambda: self._draw(step, values))

    def resend(self, step: int, values: dict[str, float]) -> None:
        self._background.submit(lambda: self._spool.make_up(step, values, self._draw))

    def _draw(self, step: int, values: dict[str, float]) -> None:
        self._write(step, dict(values))
        self._spool.note(step, values)

    def histogram(self, step: int, tag: str, values: Sequence[float]) -> None:
        self._log(step, lambda: {tag: self._wandb.Histogram(values)})

    def text(self, step: int, tag: str, text: str) -> None:
        self._log(step, lambda: {tag: self._wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)})

    def image(self, step: int, tag: str, pixels: Pixels) -> None:
        self._log(step, lambda: {tag: self._wandb.Image(pixels)})

    def close(self) -> None:
        self._background.close(self._end)

    def _end(self) -> None:
        # The lock is released after an error too, because the next attempt would wait for it without end.
        try:
            if self._run is not None:
                self._run.finish()
        finally:
            # The lock is not held if W&B could not be imported.
            if self._holds:
                _open_here.release()
            self._spool.close()

    def _log(self, step: int, values: Callable[[], dict[str, Any]]) -> None:
        self._background.submit(lambda: self._write(step, values()))

    def _write(self, step: int, values: dict[str, Any]) -> None:
        # The figures name their step, so that W&B drops steps that are done again when it is online.
        self._run.log(values, step=step)
        if self._spool.due:
            self._spool.upload()


def _id_of(store: Store) -> str:
    """Return the W&B id of the run. The first attempt creates it."""
    known = read_json(store, _ID)
    if known is None:
        known = {"id": secrets.token_hex(4)}
        write_json(store, _ID, known)
    return str(known["id"])
