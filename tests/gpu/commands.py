"""The literal command under torchrun, on one GPU, and what its run directory says afterwards."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.gpu import machine
from tests.gpu.machine import ROOT, read_lines
from tests.gpu.older_torch import IS_ADAPTED
from tests.support.processes import descendants, send


class RunFiles:
    """What a run has written down."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def ledger(self) -> list[dict[str, Any]]:
        return read_lines(self.directory / "steps.jsonl")

    def figures(self) -> list[dict[str, Any]]:
        """Return the figures of all log steps."""
        return read_lines(self.directory / "metrics.jsonl")

    def summary(self) -> dict[str, Any]:
        """Return the run's summary; empty if it has none."""
        path = self.directory / "summary.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found


class Command(RunFiles):
    """`torchrun --nproc-per-node N main.py --config FILE` with a run directory below `folder`."""

    def __init__(self, folder: Path, name: str, config: str, num_ranks: int = 1) -> None:
        super().__init__(folder / name)
        self.name, self._folder = name, folder
        self._num_ranks = num_ranks
        self._config = folder / f"{name}.yaml"
        self._config.write_text(config)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *overrides: str, **environment: str) -> None:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self._num_ranks)]
        own = [f"run.storage={self._folder}", f"run.name={self.name}"]
        program = "tests/gpu/older_torch.py" if IS_ADAPTED else "main.py"
        command = [sys.executable, *launcher, program, "--config", str(self._config), *own, *overrides]
        with self.log.open("a") as log:
            env = machine.environment(**environment)
            self._process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)

    @property
    def log(self) -> Path:
        return self._folder / f"{self.name}.txt"

    def wait(self, bound_s: float) -> int | None:
        """Return the exit code; None if the command had to be killed."""
        assert self._process is not None
        try:
            return self._process.wait(bound_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return None

    def run(self, bound_s: float, *overrides: str, **environment: str) -> int | None:
        self.start(*overrides, **environment)
        return self.wait(bound_s)

    def kill(self) -> None:
        """End every process of the command at once."""
        assert self._process is not None
        for pid in (self._process.pid, *descendants(self._process.pid)):
            send(pid, signal.SIGKILL)
        self._process.wait()

    def interrupt(self) -> None:
        """Ask for a stop, as Ctrl-C does: it reaches every process of the command."""
        assert self._process is not None
        for pid in (self._process.pid, *descendants(self._process.pid)):
            send(pid, signal.SIGINT)

    def wait_for_step(self, step: int, bound_s: float) -> bool:
        """Wait until the ledger has a step. Return False if it takes longer, or the command has ended."""
        assert self._process is not None
        until_s = time.monotonic() + bound_s
        while time.monotonic() < until_s and self._process.poll() is None:
            if any(line["step"] >= step for line in self.ledger()):
                return True
            time.sleep(0.05)
        return False

    def last_words(self) -> str:
        """Return the end of the command's output."""
        return " ".join(self.log.read_text()[-400:].split())
