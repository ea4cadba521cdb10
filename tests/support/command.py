"""The literal command as a user gives it, in a process group of its own, with eyes on its run directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steadfast.run.directory import RunDirectory
from steadfast.storage import LocalStore
from tests.support import processes
from tests.support.events import event_lines
from tests.support.history import History, read_ledger
from tests.support.warm import Forked, Warm

ROOT = Path(__file__).parents[2]
is_alive = processes.is_alive

TORCHRUN = ["-m", "torch.distributed.run"]
STANDALONE = [*TORCHRUN, "--standalone", "--nproc-per-node", "2"]
FOR_EVER = "run.steps=1000000"  # for a test that ends the run itself
# So that what a test waits for, above all starts of processes, need not wait for the cores of an endless run.
PAUSES = "faults.inject=[{kind: slow_at, ranks: [0, 1, 2, 3], ms: 10}]"

# A GPT of a few thousand weights, in steps long enough that a test can act between two of them.
SMALL = [
    "model.num_layers=2",
    "model.embed_dim=32",
    "model.num_heads=2",
    "model.context_length=32",
    "data.context_length=32",
    "scaling.num_workers=2",
    "schedule.warmup_steps=5",
    "validation.every=1000 steps",
    "run.report=false",
    "cluster.address=local",
]


@dataclass(frozen=True)
class Head:
    """A Ray head that runs already.

    Attributes:
        address: what `cluster.address` takes.
        pid: of its raylet, below which all of its workers are.
    """

    address: str
    pid: int


@dataclass
class Command:
    """`python main.py --config ddp.yaml ...` against a run directory below `storage`.

    Attributes:
        head: the head to run on; None leaves it to the overrides.
        started: all that were, for whoever has to see to it that they end.
        warm: the server that the command is a fork of; None starts a new Python.
    """

    storage: Path
    name: str = "run"
    launcher: list[str] = field(default_factory=list)
    config: str = "ddp.yaml"
    head: Head | None = None
    started: list[Running] = field(default_factory=list)
    warm: Warm | None = None

    @property
    def directory(self) -> Path:
        return self.storage / self.name

    def start(self, *overrides: str, small: bool = True, log: str = "output.txt") -> Running:
        words = [f"run.storage={self.storage}", f"run.name={self.name}", *(SMALL if small else ())]
        if self.head is not None:
            words.append(f"cluster.address={self.head.address}")
        if FOR_EVER in overrides:
            words.append(PAUSES)
        words += overrides
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(self.storage)}
        output = (self.storage / log).open("w+")
        command = [*self.launcher, "main.py", "--config", self.config, *words]
        process: Forked | subprocess.Popen[Any] | None = None
        if self.warm is not None and not self.launcher:
            process = self.warm.start(command, environment, output.fileno())
        if process is None:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        output.close()
        running = Running(process, self.directory, Path(output.name), self.head)
        self.started.append(running)
        return running

    def run(self, *overrides: str, timeout_s: float = 120, small: bool = True) -> Finished:
        return self.start(*overrides, small=small).wait(timeout_s)


# Makes a command from a name and options, in a storage that it knows.
Commands = Callable[..., Command]


@dataclass(frozen=True)
class Finished:
    code: int
    output: str


@dataclass
class Running:
    process: Forked | subprocess.Popen[Any]
    directory: Path
    output_path: Path
    head: Head | None = None

    def wait(self, timeout_s: float = 120) -> Finished:
        try:
            code = self.process.wait(timeout_s)
        finally:
            self.end()
        return Finished(code, self.output_path.read_text())

    def wait_for_step(self, step: int, timeout_s: float = 90) -> None:
        self.wait_until(lambda: self.history.last_step >= step, f"step {step}", timeout_s)

    def wait_for_event(self, name: str, timeout_s: float = 90, **fields: Any) -> dict[str, Any]:
        def found() -> list[dict[str, Any]]:
            return [e for e in self.events if e["event"] == name and fields.items() <= e.items()]

        self.wait_until(lambda: bool(found()), f"event {name} {fields}", timeout_s)
        return found()[0]

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = 90) -> None:
        """Looks at files that other processes write: there is nothing else to await from outside."""
        deadline = time.monotonic() + timeout_s
        while True:
            ended = self.process.poll() is not None  # before the look, which so sees all that it has written
            began_s = time.monotonic()
            if condition():
                return
            assert not ended, f"ended before {what}:\n{self.output_path.read_text()}"
            assert time.monotonic() < deadline, f"no {what} in {timeout_s} s:\n{self.output_path.read_text()}"
            time.sleep(max(0.02, 5 * (time.monotonic() - began_s)))  # a look reads all of the ledger

    @property
    def history(self) -> History:
        return read_ledger(LocalStore(self.directory))

    @property
    def events(self) -> list[dict[str, Any]]:
        return event_lines(RunDirectory(LocalStore(self.directory)))

    def worker_pids(self, title: str = "SlotWorker") -> list[int]:
        """Return the pids of this command's training processes, in an order that says nothing of age or role.

        On a shared head they are below its raylet, and all of them this command's: one at a time uses it.
        """
        below = [self.process.pid] if self.head is None else [self.process.pid, self.head.pid]
        return sorted(pid for root in below for pid, name in descendants(root) if title in name)

    def kill_workers(self, count: int) -> None:
        for pid in self.worker_pids()[:count]:
            os.kill(pid, signal.SIGKILL)

    def scale(self, bounds: str) -> subprocess.CompletedProcess[str]:
        return scale(self.directory, bounds)

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """As a terminal does: to the whole foreground process group."""
        os.killpg(self.process.pid, number)

    def end(self) -> None:
        left = [pid for pid, _ in descendants(self.process.pid)]
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in left:
            if is_alive(pid) and os.getsid(pid) == self.process.pid:
                os.kill(pid, signal.SIGKILL)


def scale(directory: Path, bounds: str) -> subprocess.CompletedProcess[str]:
    """The literal command that gives a run other bounds."""
    command = [sys.executable, "main.py", "scale", str(directory), "--workers", bounds]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


def descendants(root: int) -> list[tuple[int, str]]:
    """(pid, title) of every living process that `root` started, directly or not."""
    return list(processes.descendants(root).items())


def files_with(text: str, *folders: Path) -> list[Path]:
    """Return the files below these folders that hold a text."""
    found: list[Path] = []
    for folder in folders:
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert files, f"{folder} is empty"
        found += [file for file in files if text.encode() in file.read_bytes()]
    return found
