"""Kills without end: workers at work and newcomers on their way are killed at random moments, again and again.

python -m tests.benchmarks.storm --kills 50 --storms 5

Each storm is one run on one node, ended by Ctrl-C after the last kill. Printed are the kills, the worlds they made, the
stall between each two of them, what was done twice, how often somebody was taken for hung, and the largest difference
of any weight to an undisturbed run of one worker and as many steps (fp64); last, how far from that one an undisturbed
run of all workers is, by the order of its sums alone. A soak leaves both out, and lets each microbatch take 20 ms
longer, as on an accelerator, so that the two cores are there for those who start:

python -m tests.benchmarks.storm --kills 500 --workers 5 --alone --pace 20

At least one worker that holds the state is always left alone; `--spare-nobody` kills whatever comes, newcomers, the
last holder of the state and the coordinator too, with an hour between two checkpoints.
"""

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
from tests.support.checks import check_ledger, differences, summary_of
from tests.support.command import Command, Running, descendants

_PAUSE_S = (0.2, 2.5)  # between two kills
_LONG_PAUSE_S = (1.0, 8.0)  # where nobody is spared: newcomers are to have a chance
_SAY_EVERY = 20  # kills
_LONGEST_STEP_S = 0.5  # of one that nobody disturbs, on a busy machine
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
    given = ["checkpoint.every=60 minutes"] if options.spare_nobody else []
    if options.pace:
        given.append(f"faults.inject=[{{kind: slow_at, ranks: {list(range(workers))}, ms: {options.pace}}}]")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": workers, "include_dashboard": False})
    try:
        running = Command(folder, f"storm-{number}").start(
            *_WORDS,
            *given,
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
    apart = ["-", "-"] if options.alone else compare(folder, number, running.directory, summary["step"], workers)
    return [*row(number, done, summary, history.lines, alarms), *apart]


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


def compare(folder: Path, number: int, ours: Path, steps: int, workers: int) -> list[str]:
    """Return the largest difference of a weight of one undisturbed worker to ours, and to several undisturbed ones."""
    one = undisturbed(folder, f"one-{number}", steps, 1)
    several = undisturbed(folder, f"several-{number}", steps, workers)
    return [f"{max(float(each.abs().max()) for each in differences(one, other)):.1e}" for other in (ours, several)]


def undisturbed(folder: Path, name: str, steps: int, workers: int) -> Path:
    """Return the run directory of a run that nobody disturbs."""
    words = [*_WORDS, f"run.steps={steps}", f"scaling.num_workers={workers}"]
    command = Command(folder, name)
    finished = command.run(*words, timeout_s=300 + _LONGEST_STEP_S * steps)
    assert finished.code == 0, finished.output
    return command.directory


def row(number: int, kills: int, summary: dict[str, Any], lines: list[dict[str, Any]], alarms: int) -> list[str]:
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
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--storms", type=int, default=1)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--alone", action="store_true", help="without undisturbed runs to compare with")
    parser.add_argument("--spare-nobody", action="store_true", help="not the last holder of the state either")
    parser.add_argument("--pace", type=int, default=0, help="milliseconds that a microbatch takes longer")
    options = parser.parse_args()
    head = ["storm", "kills", "worlds", "steps", "done twice", "unconfirmed", "stall median s", "max s"]
    head += ["false alarms", "difference", "undisturbed"]
    rows = [head]
    for number in range(1, options.storms + 1):
        with tempfile.TemporaryDirectory(prefix="storm-") as folder:
            rows.append(storm(Path(folder), number, options))
            print(rows[-1], flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
