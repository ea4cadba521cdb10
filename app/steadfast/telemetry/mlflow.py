"""Tracker for MLflow."""

import importlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from steadfast.config import MlflowConfig
from steadfast.errors import ConfigError, Problem
from steadfast.storage import LocalStore, Store
from steadfast.storage.documents import read_json, write_json
from steadfast.telemetry.media import Pixels

_FOLDER = "mlflow"
_ID = f"{_FOLDER}/run.json"
# MLflow's limits.
_PARAM_CHARACTERS = 6000
_PARAMS_OF_A_CALL = 100


class MlflowTracker:
    """Draws all attempts of a run as one run of MLflow.

    Resized and resumed runs continue the same MLflow run. MLflow has no histograms.
    """

    def __init__(
        self, config: MlflowConfig, uri: str | None, name: str, document: dict[str, Any], store: Store
    ) -> None:
        """Open the MLflow run `name`, with `document` as its parameters."""
        self._last: dict[str, int] = {}  # last step of each metric that an earlier attempt has stored
        mlflow = importlib.import_module("mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        artifacts = None
        if uri is None:
            folder = Path(store.uri).resolve() / _FOLDER
            folder.mkdir(parents=True, exist_ok=True)
            uri, artifacts = f"sqlite:///{folder}/mlflow.db", str(folder / "artifacts")
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        known = read_json(store, _ID)
        self._continues = known is not None
        if known is not None:
            self._run = str(known["id"])
            self._client.update_run(self._run, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(config.experiment)
        if experiment is None:
            experiment_id = self._client.create_experiment(config.experiment, artifact_location=artifacts)
        else:
            experiment_id = experiment.experiment_id
        self._run = self._client.create_run(experiment_id, run_name=name).info.run_id
        write_json(store, _ID, {"id": self._run})
        params = [self._entities.Param(key, value) for key, value in _flat(document)]
        for start in range(0, len(params), _PARAMS_OF_A_CALL):
            self._client.log_batch(self._run, params=params[start : start + _PARAMS_OF_A_CALL])

    def scalars(self, step: int, values: dict[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        new = [tag for tag in values if step > self._last_step(tag)]
        metrics = [self._entities.Metric(tag, values[tag], now_ms, step) for tag in new]
        self._client.log_batch(self._run, metrics=metrics)

    def _last_step(self, tag: str) -> int:
        """Return the last step of a metric that an earlier attempt has stored, or -1."""
        # MLflow would keep a second value of a step that is done again, and the second equals the first.
        if tag not in self._last:
            history = self._client.get_metric_history(self._run, tag) if self._continues else []
            self._last[tag] = max((metric.step for metric in history), default=-1)
        return self._last[tag]

    def histogram(self, step: int, tag: str, values: Sequence[float]) -> None:
        pass

    def text(self, step: int, tag: str, text: str) -> None:
        self._client.log_text(self._run, text, f"{tag}/{step}.txt")

    def image(self, step: int, tag: str, pixels: Pixels) -> None:
        self._client.log_image(self._run, pixels, key=tag, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run)


def tracking_uri(config: MlflowConfig, store: Store) -> str | None:
    """Return the URI of MLflow's server or database, None for a database in the run directory.

    Raises:
        ConfigError: the run is in a bucket and no tracking server is named.
    """
    uri = config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if uri is None and not isinstance(store, LocalStore):
        what = "mlflow needs tracking_uri or MLFLOW_TRACKING_URI, because run.storage is a bucket"
        raise ConfigError([Problem("", "trackers", what)])
    return uri


def _flat(document: dict[str, Any], outer: str = "") -> list[tuple[str, str]]:
    """Return the keys of a configuration with dots, and their values as text."""
    found: list[tuple[str, str]] = []
    for key, value in document.items():
        if isinstance(value, dict) and value:
            found += _flat(value, f"{outer}{key}.")
        else:
            found.append((f"{outer}{key}", str(value)[:_PARAM_CHARACTERS]))
    return found
