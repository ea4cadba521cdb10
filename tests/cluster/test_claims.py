"""A run belongs to one command at a time, and who has lost it ends and leaves it alone."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.support.command import STANDALONE, Commands, Running

OVERRIDES = ["run.steps=1000000", "checkpoint.every=1000 seconds"]


def take_over(folder: Path) -> str:
    """As a command elsewhere does, after a pause of this one's that was longer than a lease."""
    owner = json.loads((folder / "owner.json").read_text())
    others = {**owner, "token": "another", "host": "elsewhere", "renewed": time.time()}
    (folder / "new").write_text(json.dumps(others))
    (folder / "new").replace(folder / "owner.json")
    return (folder / "owner.json").read_text()


def check_ended(running: Running, owner: str) -> None:
    ended = running.wait(40)
    assert ended.code in (1, 2)
    assert "error: another command has taken over" in ended.output
    assert "on elsewhere" in ended.output
    assert (running.directory / "owner.json").read_text() == owner
    assert not (running.directory / "checkpoints").exists()


@pytest.mark.ray
@pytest.mark.timeout(240)
def test_a_command_whose_run_is_taken_over_ends_and_says_so(on_head: Commands) -> None:
    """Within the interval in which it renews, and without a failure that would make it look."""
    running = on_head("taken").start(*OVERRIDES)
    running.wait_for_step(5)
    check_ended(running, take_over(running.directory))


@pytest.mark.timeout(240)
def test_so_it_does_under_torchrun(command: Commands) -> None:
    running = command("taken", launcher=STANDALONE).start(*OVERRIDES)
    running.wait_for_step(5)
    check_ended(running, take_over(running.directory))
