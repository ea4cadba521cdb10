"""The literal command with its run in a bucket: nothing of it is on a disk that the workers share."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from steadfast.run.directory import RunDirectory
from steadfast.storage import LocalStore, open_store
from tests.support.checks import check_ledger
from tests.support.command import Commands
from tests.support.events import event_lines
from tests.support.history import read_ledger
from tests.support.s3 import Proxy

pytestmark = pytest.mark.ray


@pytest.mark.timeout(300)
def test_a_run_in_a_bucket_survives_a_worker_and_is_stopped_and_resumed(
    on_head: Commands, proxy: Proxy, tmp_path: Path
) -> None:
    directory = RunDirectory(open_store(proxy.uri("runs/run")))
    words = [f"run.storage={proxy.uri('runs')}", "checkpoint.every=100 steps"]

    running = on_head().start(*words, "run.steps=1000000")
    running.wait_until(lambda: read_ledger(directory.store).last_step >= 60, "step 60 in the bucket")
    os.kill(running.worker_pids("SlotWorker")[0], signal.SIGKILL)
    running.wait_until(lambda: bool(told(directory, "restore")), "the survivor's state")
    running.interrupt()
    stopped = running.wait(60)
    assert stopped.code == 3, stopped.output
    summary = directory.summary()
    assert summary is not None
    reached = summary["step"]

    steps = reached + 50
    finished = on_head().run(*words, f"run.steps={steps}")
    assert finished.code == 0, finished.output
    restored = told(directory, "restore")[-1]
    assert (restored["step"], restored["source"], restored["lost_steps"]) == (reached, "checkpoint", 0)
    assert not (tmp_path / "run").exists()
    for name in ("config.yaml", "steps.jsonl", "summary.json"):
        copy(directory, tmp_path / "copy", name)
    check_ledger(tmp_path / "copy", steps)
    assert directory.store.list("tensorboard")


def told(directory: RunDirectory, name: str) -> list[dict[str, Any]]:
    return [event for event in event_lines(directory) if event["event"] == name]


def copy(directory: RunDirectory, folder: Path, name: str) -> None:
    parts = directory.store.list(name)
    data = b"".join(directory.store.read(f"{name}/{part}") for part in parts) or directory.store.read(name)
    LocalStore(folder).write(name, [data])
