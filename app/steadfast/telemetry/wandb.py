"""Tracker for Weights & Biases."""

import html
import importlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from steadfast.config import WandbConfig
from steadfast.storage import Store
from steadfast.storage.documents import read_json, write_json
from steadfast.telemetry.media import Pixels

_ID = "wandb/run.json"
_FLUSH_S = 0.1  # instead of fifteen seconds by default, because a killed leader loses unflushed figures


class WandbTracker:
    """Draws all attempts of a run as one run of W&B.

    Resized and resumed runs continue the same W&B run.
    """

    def __init__(self, config: WandbConfig, name: str, document: dict[str, Any], store: Store, folder: Path) -> None:
        """Open the W&B run `name`, with `document` as its configuration and its files in `folder`."""
        self._wandb = importlib.import_module("wandb")
        folder.mkdir(parents=True, exist_ok=True)
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
            dir=str(folder),
            settings=settings,
        )

    def _mode(self) -> str:
        return "online" if self._wandb.api.api_key else "offline"

    def scalars(self, step: int, values: dict[str, float]) -> None:
        # The figures name their step, so that W&B drops steps that are done again when it is online.
        self._run.log(dict(values), step=step)

    def histogram(self, step: int, tag: str, values: Sequence[float]) -> None:
        self._run.log({tag: self._wandb.Histogram(values)}, step=step)

    def text(self, step: int, tag: str, text: str) -> None:
        self._run.log({tag: self._wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)}, step=step)

    def image(self, step: int, tag: str, pixels: Pixels) -> None:
        self._run.log({tag: self._wandb.Image(pixels)}, step=step)

    def close(self) -> None:
        self._run.finish()


def _id_of(store: Store) -> str:
    """Return the W&B id of the run. The first attempt creates it."""
    known = read_json(store, _ID)
    if known is None:
        known = {"id": secrets.token_hex(4)}
        write_json(store, _ID, known)
    return str(known["id"])
