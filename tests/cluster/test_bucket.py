"""The literal command with its run in a bucket: nothing of it is on a disk that the workers share."""

from __future__ import annotations

import os
import signal

import pytest

from app.ledger import read_ledger
from app.rundir import RunDirectory
from app.storage import LocalStore, open_store
from tests.checks import check_ledger


@pytest.mark.timeout(300)
def test_a_run_in_a_bucket_survives_a_worker_and_is_stopped_and_resumed(command, proxy, tmp_path):
    directory = RunDirectory(open_store(proxy.uri("runs/run")))
    words = [f"run.storage={proxy.uri('runs')}", "checkpoint.every=100 steps"]

    running = command().start(*words, "run.steps=1000000")
    running.wait_until(lambda: read_ledger(directory.store).last_step >= 60, "step 60 in the bucket")
    os.kill(running.worker_pids("SlotWorker")[0], signal.SIGKILL)
    running.wait_until(lambda: told(directory, "restore"), "the survivor's state")
    running.interrupt()
    stopped = running.wait(60)
    assert stopped.code == 3, stopped.output
    reached = directory.summary()["step"]

    steps = reached + 50
    finished = command().run(*words, f"run.steps={steps}")
    assert finished.code == 0, finished.output
    restored = told(directory, "restore")[-1]
    assert (restored["step"], restored["source"], restored["lost_steps"]) == (reached, "checkpoint", 0)
    assert not (tmp_path / "run").exists()
    for name in ("config.yaml", "steps.jsonl", "summary.json"):
        copy(directory, tmp_path / "copy", name)
    check_ledger(tmp_path / "copy", steps)
    assert directory.store.list("tensorboard")


def told(directory, name):
    return [event for event in directory.read_events() if event["event"] == name]


def copy(directory, folder, name):
    parts = directory.store.list(name)
    data = b"".join(directory.store.read(f"{name}/{part}") for part in parts) or directory.store.read(name)
    LocalStore(folder).write(name, [data])
