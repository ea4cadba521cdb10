"""A coordinator answers more workers than Ray lets call an actor at the same time."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support.command import ROOT


def test_1001_workers_ask_for_their_places_and_the_driver_is_answered_meanwhile() -> None:
    command = [sys.executable, "-m", "tests.cluster.many_asks", "1001"]
    output = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = json.loads(output.splitlines()[-1])
    assert found["answered"] == 1001
    assert found["all_s"] < 60
    assert found["events_s"] < 5
