"""The host's time between a step's gate and the next forward, in which a GPU has nothing to do."""

import subprocess
import sys


def test_host_needs_little_more_than_an_update_between_gate_and_forward() -> None:
    # A process of its own, since the benchmark changes torch's optimizer.
    command = [sys.executable, "-m", "tests.benchmarks.host", "--steps", "300"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
