"""One result to the bit, whatever the workers: the literal command in ten ways, and the hashes that it ends with.

python -m tests.benchmarks.one_hash --precision fp32 --steps 200
python -m tests.benchmarks.one_hash --precision bf16 --steps 200 --only torchrun-1 ray-resized

The GPT of ddp.yaml with dropout, `run.exact`, by torchrun and under Ray: worlds of 1 to 4, shares that are uneven, a
world that goes 4 -> 3 -> 1 -> 2 -> 4 with a worker killed in between, and a run of which all workers and then the
command itself are killed, and that others resume. Exits with 1 unless all have one `model_sha256` and one
`optimizer_sha256`. With --ordinary they run without `run.exact`, to show how many hashes there are then.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from steadfast.run.directory import RunDirectory
from steadfast.storage import LocalStore
from tests.benchmarks.statistics import table
from tests.support.command import Command, Running

_START_S, _LEG_S = 600.0, 1800.0
_TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
_SLOW = "faults.inject=[{kind: slow_at, ranks: [1], ms: 200}]"


class Way(NamedTuple):
    """How a run is done. It is given the command, words for each start, and the number of steps."""

    name: str
    run: Callable[[Command, list[str], int], Running]
    torchrun: int = 0  # ranks; 0 for Ray


def _plainly(*words: str) -> Callable[[Command, list[str], int], Running]:
    return lambda command, common, num_steps: command.start(*common, *words, small=False)


def _resized(command: Command, common: list[str], num_steps: int) -> Running:
    """4 -> 3 -> 1 -> 2 -> 4, a kill in each world of several."""
    running = command.start(*common, "scaling.num_workers=4", small=False)
    few = num_steps // 20  # early, since newcomers take a while to start and the others train on meanwhile
    running.wait_for_step(few, _START_S)
    for size in (3, 1, 2, 4):
        if len(running.worker_pids()) > 1:  # alone there would be nobody left
            os.kill(running.worker_pids()[0], signal.SIGKILL)
            running.wait_for_step(running.history.last_step + few, _LEG_S)
        answer = running.scale(f"{size}:{size}")
        assert answer.returncode == 0, answer.stderr
        running.wait_for_event("attempt_started", _LEG_S, world_size=size)
        running.wait_for_step(running.history.last_step + few, _LEG_S)
    return running


def _killed_and_resumed(command: Command, common: list[str], num_steps: int) -> Running:
    """Two workers, all killed; then the command is, and three go on from a checkpoint."""
    words = (*common, f"checkpoint.every={max(1, num_steps // 8)} steps")
    running = command.start(*words, "scaling.num_workers=2", small=False)
    running.wait_for_step(num_steps // 4, _START_S)
    for pid in running.worker_pids():
        os.kill(pid, signal.SIGKILL)
    running.wait_for_event("attempt_started", _LEG_S, attempt=2)
    running.wait_for_step(num_steps // 2, _LEG_S)
    running.end()
    return command.start(*words, "scaling.num_workers=3", small=False, log="resumed.txt")


WAYS = (
    *(Way(f"torchrun-{size}", _plainly(), size) for size in (1, 2, 3, 4)),
    Way("torchrun-uneven", _plainly("batch.balance=speed", _SLOW), 2),
    Way("ray-1", _plainly("scaling.num_workers=1")),
    Way("ray-3", _plainly("scaling.num_workers=3")),
    Way("ray-uneven", _plainly("scaling.num_workers=2", "batch.balance=speed", _SLOW)),
    Way("ray-resized", _resized),
    Way("ray-killed-and-resumed", _killed_and_resumed),
)


def run(way: Way, folder: Path, common: list[str], num_steps: int) -> list[str]:
    """Return the row of one way."""
    storage = folder / way.name
    storage.mkdir()
    launcher = [*_TORCHRUN, str(way.torchrun)] if way.torchrun else []
    command = Command(storage, launcher=launcher)
    words = [*common, *([] if way.torchrun else ["cluster.address=local"])]
    began_s = time.monotonic()
    running = way.run(command, words, num_steps)
    try:
        finished = running.wait(4 * _LEG_S)
    finally:
        for each in command.started:
            each.end()
    if finished.code:
        raise SystemExit(f"{way.name} ended with {finished.code}:\n{finished.output[-3000:]}")
    directory = RunDirectory(LocalStore(storage / "run"))
    summary: dict[str, Any] = directory.summary() or {}
    worlds = [int(line["world_size"]) for _, line in sorted(running.history.committed.items())]
    changes = [str(size) for index, size in enumerate(worlds) if not index or size != worlds[index - 1]]
    return [
        way.name,
        " ".join(changes),
        str(summary["attempts"]),
        str(summary["lost_steps"]),
        summary["model_sha256"][:12],
        summary["optimizer_sha256"][:12],
        f"{summary['metrics']['loss']:.15g}",
        f"{time.monotonic() - began_s:.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp64"), default="fp32")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", nargs="*", choices=[way.name for way in WAYS])
    parser.add_argument("--ordinary", action="store_true", help="without run.exact")
    options = parser.parse_args()
    common = [
        f"run.steps={options.steps}",
        f"run.exact={'false' if options.ordinary else 'true'}",
        "run.report=false",
        "model.dropout=0.1",
        f"precision.kind={options.precision}",
        "trackers=[]",
        "logging.every_steps=50",
    ]
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory(prefix="one-hash-") as folder:
        for way in WAYS:
            if not options.only or way.name in options.only:
                rows.append(run(way, Path(folder), common, options.steps))
                print(" ".join(rows[-1]), flush=True)
    titles = ["way", "worlds", "attempts", "steps redone", "model_sha256", "optimizer_sha256", "validation loss", "s"]
    print(table([titles, *rows]))
    results = {(row[4], row[5]) for row in rows}
    print(f"{len(results)} results over {len(rows)} ways, {options.precision}, {options.steps} steps")
    sys.exit(len(results) != 1 and not options.ordinary)


if __name__ == "__main__":
    main()
