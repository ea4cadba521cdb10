"""MLflow itself, on a database of its own: attempts of a run are one run there."""

import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steadfast.config import MlflowConfig, parse_config
from steadfast.errors import ConfigError
from steadfast.storage import LocalStore, open_store
from steadfast.telemetry.mlflow import MlflowTracker, tracking_uri
from steadfast.telemetry.spool import Spool
from steadfast.telemetry.trackers import BackgroundTracker, build_trackers

mlflow = pytest.importorskip("mlflow")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's use of SQLAlchemy


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("_MLFLOW_TELEMETRY_SESSION_ID", "tests")  # which MLflow would leave behind


def tracker(folder: Path, **fields: Any) -> BackgroundTracker:
    document = {"batch": {"global_size": 48}, "hooks": [], "model": {}}
    config, store = MlflowConfig(**fields), LocalStore(folder)
    build = partial(MlflowTracker, config, tracking_uri(config, store), "mine", document, store)
    return BackgroundTracker("MLflow", build, Spool(store, "mlflow"))


def runs(uri: str) -> list[Any]:
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("steadfast")
    return list(client.search_runs([experiment.experiment_id]))


def test_attempts_are_one_run_with_each_step_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow/mlflow.db"
    for first in (1, 4, 12):  # the second attempt does two steps again, the third lacks three of a killed leader
        opened = tracker(tmp_path)
        for step in range(1, first):  # of which MLflow has some
            opened.resend(step, {"train/loss": 1 / step})
        for step in range(first, first + 5):
            opened.scalars(step, {"train/loss": 1 / step})
        opened.text(first, "events", "rank 0 has died")
        opened.image(first, "sample", np.zeros((4, 5, 3), np.uint8))
        opened.histogram(first, "norms", [1.0])
        opened.close()
    [run] = runs(uri)
    assert run.info.run_name == "mine"
    assert run.info.status == "FINISHED"
    assert run.data.params == {"batch.global_size": "48", "hooks": "[]", "model": "{}"}
    client = mlflow.MlflowClient(tracking_uri=uri)
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [metric.step for metric in history] == list(range(1, 17))
    assert [metric.value for metric in history] == [1 / step for step in range(1, 17)]
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"events", "images"}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING and "is off" in record.message]


def test_a_run_in_progress_is_shown_as_such(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/other.db"
    opened = tracker(tmp_path / "run", tracking_uri=uri)
    opened.scalars(1, {"train/loss": 1.0})
    until_s = time.monotonic() + 30
    while not (tmp_path / "run/mlflow/run.json").exists() and time.monotonic() < until_s:
        time.sleep(0.1)
    [run] = runs(uri)
    assert run.info.status == "RUNNING"
    opened.close()


def test_a_bucket_needs_a_server() -> None:
    with pytest.raises(ConfigError, match="tracking_uri or MLFLOW_TRACKING_URI, because"):
        build_trackers(parse_config("trackers: [{kind: mlflow}]"), open_store("s3://bucket/runs"), 1)
