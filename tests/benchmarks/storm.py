"""Kills without end: workers at work and newcomers on their way are killed at random moments, again and again.

python -m tests.benchmarks.storm --kills 50 --storms 5

Each storm is one run on one node, ended by Ctrl-C after the last kill. Printed are the kills, the worlds they made, the
stall between each two of them, what was done twice, how often somebody was taken for hung, and the largest difference
of any weight to an undisturbed run of as many steps (fp64). That takes as long again: a soak leaves it out, and lets
each microbatch take 20 ms longer, as on an accelerator, so that the two cores are there for those who start:

python -m tests.benchmarks.storm --kills 500 --workers 5 --alone --pace 20

At least one worker that holds the state is always left alone; `--spare-nobody` kills whatever comes, newcomers, the
last holder of the state and the coordinator too, with an hour between two checkpoints.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from ray.cluster_utils import Cluster

from tests.benchmarks.stalls import between_worlds
from tests.benchmarks.statistics import table
from tests.checks import check_ledger, summary_of, weights_of
from tests.command import Command, Running, descendants

_PAUSE_S = (0.2, 2.5)  # between two kills
_LONG_PAUSE_S = (1.0, 8.0)  # where nobody is spared: newcomers are to have a chance
_SAY_EVERY = 20  # kills
_AMONG_NEWCOMERS = 0.2  # share of the pauses after which one is killed all the same
_WORDS = [
    "run.steps=10000000",
    "schedule.kind=constant",
    "schedule.warmup_steps=0",
    "precision.kind=fp64",
    "trackers=[]",
    "recovery.max_failures=1000",
]


def storm(folder: Path, number: int, options: argparse.Namespace) -> list[str]:
    """One row of the table."""
    chance, workers = random.Random(options.seed + number), options.workers
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": workers, "include_dashboard": False})
    try:
        running = Command(folder, f"storm-{number}").start(
            *_WORDS,
            *pace(options),
            *rarely(options),
            f"scaling.num_workers=[1,{workers}]",
            f"cluster.address={cluster.address}",
        )
        running.wait_for_event("attempt_started", world_size=workers)
        done, killed_s = 0, time.time()
        while done < options.kills:
            time.sleep(chance.uniform(*(_LONG_PAUSE_S if options.spare_nobody else _PAUSE_S)))
            assert running.process.poll() is None, f"after {done} kills:\n{running.output_path.read_text()}"
            if kill_any(running, chance, killed_s) if options.spare_nobody else kill_one(running, chance, killed_s):
                done, killed_s = done + 1, time.time()
                if done % _SAY_EVERY == 0:
                    print(f"storm {number}: {done} of {options.kills} kills", file=sys.stderr, flush=True)
        running.wait_for_step(running.history.last_step + 1)  # or there may be nobody to write the state down
        running.interrupt()
        stopped = running.wait()
    finally:
        cluster.shutdown()
    assert stopped.code == 3, stopped.output
    summary = summary_of(running.directory)
    history = check_ledger(running.directory, summary["step"])
    alarms = sum(event["event"] == "failure" and event["kind"] == "hang" for event in running.events)
    largest = "-" if options.alone else f"{difference(folder, number, running.directory, summary['step']):.1e}"
    return row(number, done, summary, history.lines, alarms, largest)


def pace(options: argparse.Namespace) -> list[str]:
    ranks = list(range(options.workers))
    return [f"faults.inject=[{{kind: slow_at, ranks: {ranks}, ms: {options.pace}}}]"] if options.pace else []


def rarely(options: argparse.Namespace) -> list[str]:
    return ["checkpoint.every=60 minutes"] if options.spare_nobody else []


def kill_any(running: Running, chance: random.Random, killed_s: float) -> bool:
    """Any process of the run but those of Ray itself. False while there is none, and mostly while no step has ended
    since the last kill, at Unix time `killed_s`: on a busy machine nobody would live long enough to do one."""
    if running.history.lines[-1]["time_s"] < killed_s and chance.random() > _AMONG_NEWCOMERS:
        return False
    victims = []
    for pid, title in descendants(os.getpid()):
        if "SlotWorker" in title or title.startswith("ray::Coordinator"):
            victims.append(pid)
    if victims:
        os.kill(chance.choice(victims), signal.SIGKILL)
    return bool(victims)


def kill_one(running: Running, chance: random.Random, killed_s: float) -> bool:
    """Any worker process but one of those at work. False where none can be spared: a world that has done no step since
    the last kill, at Unix time `killed_s`, may be smaller than it says."""
    last = running.history.lines[-1]
    workers = [pid for pid, title in descendants(os.getpid()) if "SlotWorker" in title]
    if last["time_s"] < killed_s or last["world_size"] < 2 or len(workers) < 2:
        return False
    os.kill(chance.choice(workers), signal.SIGKILL)
    return True


def difference(folder: Path, number: int, ours: Path, steps: int) -> float:
    undisturbed = Command(folder, f"undisturbed-{number}")
    finished = undisturbed.run(*_WORDS, f"run.steps={steps}", "scaling.num_workers=1", timeout_s=600)
    assert finished.code == 0, finished.output
    one, other = weights_of(ours), weights_of(undisturbed.directory)
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def row(
    number: int, kills: int, summary: dict[str, Any], lines: list[dict[str, Any]], alarms: int, largest: str
) -> list[str]:
    gaps = between_worlds(lines)
    unconfirmed = sum(line.get("confirmed") is False for line in lines)
    return [
        str(number),
        str(kills),
        str(summary["attempts"]),
        str(summary["step"]),
        f"{summary['lost_steps']} ({summary['lost_steps'] / kills:.1f} a kill)",
        str(unconfirmed),
        f"{median(gaps):.3f}",
        f"{max(gaps):.3f}",
        str(alarms),
        largest,
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--storms", type=int, default=1)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--alone", action="store_true", help="without an undisturbed run beside it")
    parser.add_argument("--spare-nobody", action="store_true", help="not the last holder of the state either")
    parser.add_argument("--pace", type=int, default=0, help="milliseconds that a microbatch takes longer")
    options = parser.parse_args()
    head = ["storm", "kills", "worlds", "steps", "done twice", "unconfirmed", "stall median s", "max s"]
    head += ["false alarms", "difference"]
    rows = [head]
    for number in range(1, options.storms + 1):
        with tempfile.TemporaryDirectory(prefix="storm-") as folder:
            rows.append(storm(Path(folder), number, options))
            print(rows[-1], flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
