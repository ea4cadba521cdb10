"""What the death of any one process costs: steps that are done again, and seconds without a new step.

python -m tests.benchmarks.deaths --rounds 5

Three workers on two real raylets of one machine, beside a head that trains nothing; then a run with a Ray of its own,
whose raylet and GCS are killed. Each round kills each kind of process once, by SIGKILL, in a run that trains.
"""

import argparse
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from ray.cluster_utils import Cluster

from tests.benchmarks.statistics import table
from tests.support import processes
from tests.support.command import Command, Running, descendants, is_alive

WORLD_SIZE = 3
STRATEGIES = ("ddp", "fsdp")
_WORDS = [
    *("run.steps=10000000", "logging.every_steps=1000", "trackers=[]"),
    *("validation.every=null", "checkpoint.every=1 minutes"),
]
_STORE_BYTES = 80 * 2**20
_BETWEEN_STEPS = 60  # that a run trains before the next death
_GROWN_S = 25.0  # a node whose workers keep dying younger than 20 s is left out for ten minutes
_LIMIT_S = 240.0


@dataclass
class Nodes:
    """A head without room for workers, and two nodes with room for two each. `running` is what runs there now."""

    command: Command
    words: list[str]
    running: Running = field(init=False)

    def __post_init__(self) -> None:
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": _STORE_BYTES}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(2):
            self.add()
        self.start()

    def add(self) -> None:
        self.cluster.add_node(num_cpus=2, object_store_memory=_STORE_BYTES)

    def start(self) -> None:
        self.running = self.command.start(*_WORDS, *self.words, f"cluster.address={self.cluster.address}")

    def workers(self) -> dict[int, list[int]]:
        """Return the pids of the workers below each raylet."""
        raylets = [pid for pid, title in descendants(os.getpid()) if "raylet/raylet " in title]
        return {raylet: _below(raylet, "SlotWorker") for raylet in raylets}

    def all_workers(self) -> list[int]:
        return [pid for pids in self.workers().values() for pid in pids]

    def wait_until_grown(self) -> None:
        """Wait until the workers are so old that their deaths do not speak against their nodes."""

        def grown() -> bool:
            ages = [time.time() - _born_s(pid) for pid in self.all_workers()]
            return len(ages) >= WORLD_SIZE and min(ages) > _GROWN_S

        self.running.wait_until(grown, "workers that have lived for a while", _LIMIT_S)

    def of_one_node(self) -> tuple[int, list[int]]:
        """Return a node that holds workers, the first of them if both do: its raylet, and its workers."""
        return next((raylet, pids) for raylet, pids in self.workers().items() if pids)

    def replace_lost(self) -> None:
        """Take the node whose raylet is dead out of the cluster, and put a new one in its place."""
        self.running.wait_until(lambda: bool(self._lost()), "dead raylet", _LIMIT_S)  # a signal takes its time
        for node in self._lost():
            self.cluster.remove_node(node, allow_graceful=False)
            self.add()

    def _lost(self) -> list[Any]:
        nodes = list(self.cluster.worker_nodes)
        return [node for node in nodes if "raylet" in {kind for kind, _ in node.dead_processes()}]

    def close(self) -> None:
        self.running.end()
        self.cluster.shutdown()


def the_last_survivor(nodes: Nodes) -> float:
    """Kill all but one, and that one as soon as it trains alone: others are starting."""
    survivor, *others = nodes.all_workers()
    kill(*others)

    def alone() -> bool:  # or taken for dead itself, on a machine that is busy with the newcomers
        return nodes.running.history.lines[-1]["world_size"] == 1 or not is_alive(survivor)

    nodes.running.wait_until(alone, "a world of one", _LIMIT_S)
    return kill(survivor)


def driver(nodes: Nodes) -> float:
    killed_s = kill(nodes.running.process.pid)
    nodes.running.process.wait()
    nodes.start()

    def begun() -> bool:  # workers outlive the command by a moment, and go on writing
        names = [event["event"] for event in nodes.running.events if event["time_s"] > killed_s]
        return "run_started" in names and "attempt_started" in names[names.index("run_started") :]

    nodes.running.wait_until(begun, "an attempt of the new command", _LIMIT_S)
    return killed_s


def raylet_of_a_node(nodes: Nodes) -> float:
    killed_s = kill(nodes.of_one_node()[0])
    nodes.replace_lost()
    return killed_s


def a_node(nodes: Nodes) -> float:
    raylet, workers = nodes.of_one_node()
    killed_s = kill(raylet, *workers)
    nodes.replace_lost()
    return killed_s


# What is killed -> how, and whether a person gives the command again.
KINDS: dict[str, tuple[Callable[[Nodes], float], bool]] = {
    "worker": (lambda nodes: kill(nodes.of_one_node()[1][0]), False),
    "all workers of a node": (lambda nodes: kill(*nodes.of_one_node()[1]), False),
    "all workers": (lambda nodes: kill(*nodes.all_workers()), False),
    "last survivor, while newcomers start": (the_last_survivor, False),
    "coordinator": (lambda nodes: kill(*_below(os.getpid(), "ray::Coordinator")), False),
    "controller": (lambda nodes: kill(*_below(os.getpid(), "ray::SlotController")), False),
    "driver": (driver, True),
    "raylet of a worker's node": (raylet_of_a_node, False),
    "node": (a_node, False),
}
RESTARTED = ("coordinator", "controller")
SPARE_WORKERS = (*RESTARTED, "driver")
OWN = {"raylet of an embedded Ray": "raylet/raylet", "GCS of an embedded Ray": "gcs_server"}


@dataclass(frozen=True)
class Death:
    seconds: float  # longest time in which no step ended that had not been done before
    redone: int


def measure_nodes(folder: Path, kind: str, rounds: int) -> dict[str, list[Death]]:
    words = [f"parallel.kind={kind}", f"scaling.num_workers=[1,{WORLD_SIZE}]"]
    nodes = Nodes(Command(folder, name=kind), words)

    def strike(name: str) -> Death:
        if name not in SPARE_WORKERS:
            nodes.wait_until_grown()
        return _measured(lambda: nodes.running, partial(KINDS[name][0], nodes), name in RESTARTED)

    try:
        return _measure_all(kind, rounds, [*KINDS], strike)
    finally:
        nodes.close()


def measure_embedded(folder: Path, kind: str, rounds: int) -> dict[str, list[Death]]:
    words = [f"parallel.kind={kind}", f"scaling.num_workers={WORLD_SIZE}"]
    running = Command(folder, name=f"{kind}-embedded").start(*_WORDS, *words)

    def strike(name: str) -> Death:
        return _measured(lambda: running, lambda: kill(*_below(running.process.pid, OWN[name])), restarts=True)

    try:
        return _measure_all(kind, rounds, [*OWN], strike)
    finally:
        running.end()


def _measure_all(kind: str, rounds: int, names: list[str], strike: Callable[[str], Death]) -> dict[str, list[Death]]:
    """Return the deaths of each name; where one cannot be measured, what has been measured is worth showing."""
    found: dict[str, list[Death]] = {}
    try:
        for name in names * rounds:
            death = strike(name)
            found.setdefault(name, []).append(death)
            print(f"{kind}: {name}: {death.redone} redone, {death.seconds:.2f} s", flush=True)
    except Exception:
        traceback.print_exc()
    return found


def _train(running: Running, since_s: float = 0.0) -> None:
    """Wait until all workers have trained together for some steps, and that after a Unix time."""

    def together() -> bool:
        lines = [line for line in running.history.lines[-_BETWEEN_STEPS:] if line["time_s"] > since_s]
        sizes = {(line["attempt"], line["world_size"]) for line in lines}
        return len(lines) == _BETWEEN_STEPS and len(sizes) == 1 and sizes.pop()[1] == WORLD_SIZE

    running.wait_until(together, f"{_BETWEEN_STEPS} steps of {WORLD_SIZE} workers", _LIMIT_S)


def _measured(running: Callable[[], Running], strike: Callable[[], float], restarts: bool) -> Death:
    """Kill, wait until all workers train together again, and look back. `restarts`: a process is started again."""
    _train(running())
    lost = running().history.num_lost
    told = _num_restarted(running())
    killed_s = strike()
    if restarts:
        running().wait_until(lambda: _num_restarted(running()) > told, "the restart", _LIMIT_S)
        _train(running(), time.time())
    _train(running(), killed_s)

    furthest = max(int(line["step"]) for line in running().history.lines if line["time_s"] <= killed_s)
    running().wait_until(lambda: _is_beyond(running()), "a step that nobody has done before", _LIMIT_S)
    ends_s = [killed_s]
    for line in running().history.lines:
        if line["time_s"] > killed_s and line["step"] > furthest:
            furthest = line["step"]
            ends_s.append(line["time_s"])
    longest_s = max(later - earlier for earlier, later in pairwise(ends_s))
    return Death(longest_s, running().history.num_lost - lost)


def _is_beyond(running: Running) -> bool:
    """Return whether the newest attempt has come further than any before it; after a driver, workers go on a while."""
    lines = running.history.lines
    newest = lines[-1]["attempt"]
    return int(lines[-1]["step"]) > max((int(line["step"]) for line in lines if line["attempt"] != newest), default=0)


def kill(*pids: int) -> float:
    """Kill processes. Return when, as Unix time."""
    killed_s = time.time()
    for pid in pids:
        processes.send(pid, signal.SIGKILL)
    return killed_s


def _born_s(pid: int) -> float:
    """Return when a process began, as Unix time; now for one that has just ended."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return time.time()


def _num_restarted(running: Running) -> int:
    return sum(event["event"] == "process_restarted" for event in running.events)


def _below(root: int, title: str) -> list[int]:
    return [pid for pid, name in descendants(root) if title in name]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    processes.adopt_orphans()
    rows = [["what is killed", "strategy", "steps redone", "seconds", "all seconds", "goes on"]]
    with tempfile.TemporaryDirectory(prefix="deaths-") as folder:
        os.environ |= {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        for kind in STRATEGIES:
            given = Path(folder), kind, options.rounds
            for name, deaths in {**measure_nodes(*given), **measure_embedded(*given)}.items():
                seconds = [death.seconds for death in deaths]
                by = "by hand: the same command" if KINDS.get(name, (None, False))[1] else "by itself"
                redone = median(death.redone for death in deaths)
                each = " ".join(f"{each:.1f}" for each in seconds)
                rows.append([name, kind, f"{redone:g}", f"{median(seconds):.2f}", each, by])
    print(table(rows))


if __name__ == "__main__":
    main()
