"""Figures for Weights & Biases."""

import html
import importlib
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

from app.config import Config, WandbConfig
from app.data.extras import require_extra
from app.storage import Store
from app.storage.documents import read_json, write_json
from app.telemetry.background import Background
from app.telemetry.spool import Spool

_FOLDER = "wandb"
_ID = f"{_FOLDER}/run.json"
_FLUSH_S = 0.1  # not the default fifteen: this is what a killed leader loses

# Held while this process has the run open, for W&B knows a run once in a process: that of an attempt which has failed
# is closed on a thread beside the next attempt.
_open_here = threading.Lock()


class WandbTracker:
    """Draws all attempts, resizes and resumes of a run as one run of Weights & Biases, on a thread of its own."""

    def __init__(self, config: WandbConfig, run: Config, store: Store) -> None:
        require_extra("wandb", "wandb", "trackers")
        self._spool = Spool(store, _FOLDER)
        self._run: Any = None
        self._holds = False
        self._background = Background("Weights & Biases")
        # A second or more, which the thread pays and the first step does not wait for.
        self._background.submit(lambda: self._open(config, run, store))

    def _open(self, config: WandbConfig, run: Config, store: Store) -> None:
        self._wandb = importlib.import_module("wandb")
        self._holds = _open_here.acquire()
        self._spool.path.mkdir(parents=True, exist_ok=True)
        settings = self._wandb.Settings(silent=True, console="off", x_transaction_log_flush_interval=_FLUSH_S)
        self._run = self._wandb.init(
            id=_id_of(store),
            resume="allow",
            # Not a run that the user's own code has open: it is not ours to draw in, nor to close.
            reinit="create_new",
            project=config.project,
            entity=config.entity,
            tags=config.tags,
            name=run.run.name,
            config=run.model_dump(mode="json", exclude={"cluster": {"env"}}),  # which may hold secrets
            mode=self._mode(config),
            dir=str(self._spool.path),
            settings=settings,
        )

    def _mode(self, config: WandbConfig) -> str:
        """Return "offline" where nothing else is asked for and there is no key to log in with."""
        if config.mode != "auto":
            return config.mode
        return os.environ.get("WANDB_MODE") or ("online" if self._wandb.api.api_key else "offline")

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._log(step, lambda: dict(values))

    def histogram(self, step: int, tag: str, values: Sequence[float]) -> None:
        self._log(step, lambda: {tag: self._wandb.Histogram(values)})

    def text(self, step: int, tag: str, text: str) -> None:
        self._log(step, lambda: {tag: self._wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)})

    def close(self) -> None:
        self._background.close(self._end)

    def _end(self) -> None:
        # Also after an error, or the next attempt would wait for ever to open the run.
        try:
            if self._run is not None:
                self._run.finish()
        finally:
            if self._holds:
                _open_here.release()
            self._spool.close()

    def _log(self, step: int, values: Callable[[], dict[str, Any]]) -> None:
        def write() -> None:
            # By the step and not in the order of calls: online, steps done again are not drawn a second time.
            self._run.log(values(), step=step)
            if self._spool.due:
                self._spool.upload()

        self._background.submit(write)


def _id_of(store: Store) -> str:
    """Return the id that the run has over there; the first attempt makes it up."""
    known = read_json(store, _ID)
    if known is None:
        known = {"id": secrets.token_hex(4)}
        write_json(store, _ID, known)
    return str(known["id"])
