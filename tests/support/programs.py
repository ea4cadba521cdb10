"""Programs of a user's own, which import the package as an installed one."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.command import ROOT


def run_program(*words: object, cwd: Path = ROOT, timeout_s: float = 120) -> str:
    """Run a program by this Python, whose words these are. Return what it prints.

    Raises:
        AssertionError: it failed. The message is its output.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "app")])}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
