"""The contenders as commands, and their processes."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

NUM_WORKERS = 2
ROOT = Path(__file__).parents[2]


def app_under_ray(config: Path) -> list[str]:
    return ["main.py", "--config", str(config)]


def app_under_torchrun(config: Path, num_workers: int = NUM_WORKERS) -> list[str]:
    return [*_torchrun(num_workers), "main.py", "--config", str(config)]


def peer(config: Path, **options: Any) -> list[str]:
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [*_torchrun(NUM_WORKERS), "-m", "tests.benchmarks.straight_loop", "--config", str(config), *flags]


def _torchrun(num_workers: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_workers)]


def write_config(path: Path, **sections: Any) -> Path:
    """A configuration for all contenders: what belongs to the app alone stays at its defaults, but that nothing is
    validated or saved half-way."""
    common: dict[str, Any] = {
        "cluster": {"address": "local"},
        "scaling": {"num_workers": NUM_WORKERS, "gpus_per_worker": 0},
        "precision": {"kind": "fp32"},
        "checkpoint": {"every": "1000000 steps"},
        "validation": {"every": None},
    }
    path.write_text(yaml.safe_dump({**common, **sections}, sort_keys=False))
    return path


def parser_of_pairs(default: int) -> argparse.ArgumentParser:
    """Return a parser with `--pairs`. From here on `timeout` and `kill` too end the command and its contenders."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=default)
    return parser


class Running:
    """A contender at work. Ends with the block: asked first, then killed with all of its process group."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name, self._log = name, log
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with open(log, "w") as out:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env=environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def __enter__(self) -> Running:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for wish in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=30 if error is None else 3)
            if self.process.poll() is not None:
                return
            os.killpg(self.process.pid, wish)

    def check(self) -> None:
        """Raises RuntimeError, with the end of its output, if it has failed."""
        if self.process.poll() not in (None, 0):
            raise RuntimeError(f"{self.name} exited with {self.process.returncode}:\n{self._log.read_text()[-3000:]}")
