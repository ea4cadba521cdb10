"""How many seconds after a fault `status RUN --json` names its cause.

python -m tests.benchmarks.faults_named

Each fault strikes a real run of two workers that train. From then on the command is given every two seconds, until one
entry of its document says what has failed and where: an event of `latest`, the causes of an interruption, or the state.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from re import search
from typing import Any

from tests.benchmarks.statistics import table
from tests.support import processes
from tests.support.bed import Bed
from tests.support.command import FOR_EVER, ROOT, SMALL, STANDALONE, Command, Running, descendants, is_alive
from tests.support.killing import flip_a_bit
from tests.support.metadata import INSTANCE_ACTION, metadata_service

LIMIT_S = 60.0
_EVERY_S = 2.0
_PATIENCE_S = 300.0
_NUM_STEPS = 20  # that two workers train before a fault
_APART = 800  # steps between two faults that the configuration injects
_NODE_IP = "127.0.0.2"  # of the node that the spot watcher serves
_ENDED = ("failed", "killed", "silent", "stopped", "waiting for workers")


@dataclass
class Scene:
    """A run under way.

    Attributes:
        start: gives the command, for the first time or again.
        mark: file by which user code is made to fail.
        stack: ends what a fault has started.
    """

    running: Running
    start: Callable[[], Running]
    mark: Path
    stack: ExitStack
    bed: Bed | None = None

    def status(self) -> dict[str, Any]:
        command = [sys.executable, "main.py", "status", str(self.running.directory), "--json"]
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
        found: dict[str, Any] = json.loads(answer.stdout)
        return found

    def wait_until_two_train(self) -> None:
        """Wait until both workers have trained together since now."""
        since_s = time.time()

        def together() -> bool:
            lines = [line for line in self.running.history.lines[-_NUM_STEPS:] if line["time_s"] > since_s]
            return len(lines) == _NUM_STEPS and all(line["world_size"] == 2 for line in lines)

        self.running.wait_until(together, "two workers that train", _PATIENCE_S)

    def workers(self) -> list[dict[str, Any]]:
        """Return both workers by rank, as `status` shows them."""
        workers: list[dict[str, Any]] = []
        while len(workers) != 2 or not all(is_alive(worker["pid"]) for worker in workers):
            workers = self.status()["workers"]
        return workers


Strike = Callable[[Scene], float]  # causes the fault, or waits for it; returns its Unix time


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        named: what one entry of the document must match, each of them, to name the fault.
        of_training: the fault strikes a run that trains.
    """

    strike: Strike
    named: tuple[str, ...]
    of_training: bool = True


def signalled(number: signal.Signals, *ranks: int) -> Strike:
    def strike(scene: Scene) -> float:
        workers = scene.workers()
        return _send(number, *(workers[rank]["pid"] for rank in ranks))

    return strike


def killed(title: str) -> Strike:
    """Kill the newest process of the command whose title holds a text."""

    def strike(scene: Scene) -> float:
        *_, pid = [pid for pid, name in descendants(scene.running.process.pid) if title in name]
        return _send(signal.SIGKILL, pid)

    return strike


def by_user_code(part: str, act: str) -> Strike:
    def strike(scene: Scene) -> float:
        scene.mark.write_text(f"{part} {act}")
        scene.running.wait_until(lambda: not scene.mark.exists(), "user code that fails")
        return time.time()

    return strike


def injected(kind: str) -> Strike:
    return lambda scene: float(scene.running.wait_for_event("fault_injected", _PATIENCE_S, kind=kind)["time_s"])


def slowed(scene: Scene) -> float:
    def lines() -> list[dict[str, Any]]:
        return [line for line in scene.running.history.lines if line["step"] == _SLOW_STEP]

    scene.running.wait_until(lambda: bool(lines()), "slow steps", _PATIENCE_S)
    return float(lines()[0]["time_s"])


def full_disk(scene: Scene) -> float:
    with (scene.running.directory.parent / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    return time.time()


def damaged_checkpoint(scene: Scene) -> float:
    scene.running.interrupt(signal.SIGTERM)
    scene.running.wait()
    newest = max((scene.running.directory / "checkpoints").iterdir(), key=lambda folder: folder.stat().st_mtime)
    flip_a_bit(max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size))
    struck_s = time.time()
    scene.running = scene.start()
    return struck_s


def killed_command(scene: Scene) -> float:
    struck_s = _send(signal.SIGKILL, scene.running.process.pid)
    scene.running.process.wait()
    return struck_s


def given_again(scene: Scene) -> float:
    struck_s = time.time()
    scene.running = scene.start()
    return struck_s


def lost_node(scene: Scene) -> float:
    assert scene.bed is not None
    node = scene.workers()[1]["node"]
    struck_s = time.time()
    scene.bed.kill(node)
    scene.bed.add()
    return struck_s


def drained_node(scene: Scene) -> float:
    assert scene.bed is not None
    node = next(worker["node"] for worker in scene.workers() if worker["node"] != scene.bed.nodes[0])
    struck_s = time.time()
    scene.bed.drain(node, LIMIT_S)
    scene.bed.add()
    return struck_s


def spot_notice(scene: Scene) -> float:
    """A stand-in for EC2's metadata service tells a real watcher beside the first node."""
    service = scene.stack.enter_context(metadata_service("aws"))
    words = [f"--host={service.host}", f"--node-ip={_NODE_IP}", "--poll-interval-s=1"]
    watcher = subprocess.Popen([sys.executable, "-m", "cluster.spot_watcher", *words], cwd=ROOT)
    scene.stack.callback(watcher.wait)
    scene.stack.callback(watcher.kill)
    struck_s = time.time()
    moment = datetime.fromtimestamp(struck_s + 120, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    service.items[INSTANCE_ACTION] = json.dumps({"action": "terminate", "time": moment})
    return struck_s


_RANK = r'rank {0}\b|"rank": {0}\b|"ranks": \[{0}\]'
_LOST = 'killed or has crashed|"kind": "worker"'
_RANK_1, _ANY_RANK = _RANK.format(1), _RANK.format("[01]")
_USER_CODE = (
    'task={target: "tests.benchmarks.faulty:Loss", args: {mark: MARK}}',
    'data={target: "tests.benchmarks.faulty:Samples", args: {mark: MARK}}',
)
_KINDS = ("nan_at", "spike_at", "oom_at")
_SLOW_STEP = _APART * (1 + len(_KINDS))
_INJECTED = [f"{{kind: {kind}, rank: 1, step: {_APART * at}}}" for at, kind in enumerate(_KINDS, 1)]
# A weight stays wrong, so that any later comparison finds it.
_FLIP = f"{{kind: flip_at, rank: 1, step: {_APART}, where: weight, bit: 21, element: 2}}"
_SLOW = f"{{kind: slow_at, ranks: [1], step: {_SLOW_STEP}, ms: 100}}"


@dataclass(frozen=True)
class Drill:
    """A run, and the faults that strike it one after another.

    Attributes:
        words: of the command; MARK is the file of the scene.
        on: "ray", which the command embeds, "nodes", a head and two nodes with room for one worker each, or "torchrun".
    """

    faults: dict[str, Fault]
    words: tuple[str, ...] = ()
    on: str = "ray"


DRILLS = (
    Drill(
        {
            "worker killed": Fault(signalled(signal.SIGKILL, 1), (_LOST, _RANK_1)),
            "exception in the loss": Fault(by_user_code("loss", "raise"), ("ValueError: a bug in the loss", _RANK_1)),
            "exception in the dataset": Fault(
                by_user_code("dataset", "raise"), ("ValueError: a bug in the dataset", _RANK_1)
            ),
            "worker exits in the loss": Fault(by_user_code("loss", "exit"), (_LOST, _RANK_1)),
            "worker stopped (SIGSTOP)": Fault(signalled(signal.SIGSTOP, 1), ("its process does not|silent", _RANK_1)),
            "hang in the loss": Fault(by_user_code("loss", "hang"), ("hang|hung", "forward", _RANK_1)),
            "hang in the dataset": Fault(by_user_code("dataset", "hang"), ("hang|hung", "loader", _RANK_1)),
            "all workers killed": Fault(signalled(signal.SIGKILL, 0, 1), (_LOST, _ANY_RANK)),
            "coordinator killed": Fault(killed("ray::Coordinator"), ("the coordinator",)),
            "command killed": Fault(killed_command, ("^killed", "on .*pid")),
            "killed command given again": Fault(given_again, ("without a report", "again"), of_training=False),
            "SIGTERM to the command": Fault(
                lambda scene: _send(signal.SIGTERM, scene.running.process.pid), ("SIGTERM to pid",)
            ),
        },
        _USER_CODE,
    ),
    Drill(
        {
            "NaN loss": Fault(injected("nan_at"), ("rollback|rolled back", rf"loss nan.* step {_APART}\b")),
            "loss spike": Fault(injected("spike_at"), ("rollback|rolled back", rf"median.* step {2 * _APART}\b")),
            "out of memory": Fault(injected("oom_at"), ("out of memory", _RANK_1)),
            "slow worker": Fault(slowed, ("slow|straggler", _RANK_1)),
            "loader process killed": Fault(killed("multiprocessing.forkserver"), ("DataLoader worker", _ANY_RANK)),
        },
        (
            "data.num_workers=1",
            f"faults.inject=[{', '.join([*_INJECTED, _SLOW])}]",
        ),
    ),
    Drill(
        {"wrong computation (bit flip)": Fault(injected("flip_at"), ("comput[a-z]+ wrongly", _RANK_1))},
        ("run.deterministic=true", "recompute.every=1 steps", f"faults.inject=[{_FLIP}]"),
    ),
    Drill(
        {
            "node drained": Fault(drained_node, ("preempt|taken away", "node")),
            "node killed": Fault(lost_node, (f"{_LOST}|is lost|is gone", _RANK_1)),
            "spot notice": Fault(spot_notice, ("preempt|taken away", "node")),
        },
        ("scaling.num_workers=[1,2]",),
        on="nodes",
    ),
    Drill(
        {
            "torchrun: checkpoint damaged, resumed": Fault(damaged_checkpoint, ("quarantined|damaged", "step")),
            "torchrun: rank killed": Fault(killed("main.py"), ('lost another rank|"peer"', _ANY_RANK)),
        },
        on="torchrun",
    ),
    Drill(
        {"torchrun: exception": Fault(by_user_code("loss", "raise"), ("ValueError: a bug in the loss", _RANK_1))},
        _USER_CODE,
        on="torchrun",
    ),
    Drill(
        {"torchrun: storage full": Fault(full_disk, ("No space left", "checkpoint"))},
        ("checkpoint.every=50 steps",),
        on="torchrun",
    ),
)


def entries(document: dict[str, Any], since_s: float) -> Iterator[str]:
    """Yield the texts of the document that are about what has happened since a Unix time."""
    if document["state"] in _ENDED:
        yield f"{document['state']} on {document['host']}, pid {document['pid']}"
    for event in document["latest"]:
        # The injection is no finding of the run's.
        if event["time_s"] >= since_s - 0.1 and event["event"] != "fault_injected":
            yield json.dumps(event)
    for interruption in document["interruptions"]:
        if interruption["time_s"] >= since_s - 0.1:
            yield "; ".join(interruption["causes"])


def measure(scene: Scene, fault: Fault) -> tuple[float | None, str]:
    """Return the seconds until the cause was named, None if it was not, and the entry that names it."""
    struck_s = fault.strike(scene)
    found: list[str] = []
    while time.time() < struck_s + 1.5 * LIMIT_S:
        found = list(entries(scene.status(), struck_s))
        named_s = time.time() - struck_s
        for text in found:
            if all(search(pattern, text) for pattern in fault.named):
                return named_s, text
        time.sleep(_EVERY_S)
    return None, " || ".join(found)


@contextlib.contextmanager
def staged(folder: Path, drill: Drill) -> Iterator[Scene]:
    """Start the run of a drill, and end it."""
    with ExitStack() as stack:
        # Ranks of torchrun outlive an agent that is killed.
        stack.callback(lambda: processes.end(list(processes.descendants())))
        words = [FOR_EVER, "trackers=[]", "model.num_layers=1"]
        words += [word.replace("MARK", f'"{folder}/mark"') for word in drill.words]
        small = list(SMALL)
        if drill.words == _USER_CODE:
            small.remove("data.context_length=32")
        bed = None
        if drill.on == "nodes":
            bed = stack.enter_context(Bed(num_nodes=0))
            bed.add(_NODE_IP)
            bed.add()
            words.append(f"cluster.address={bed.address}")
        elif drill.on == "torchrun":
            # A file system of its own, of a few megabytes
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", folder], check=True)
            stack.callback(lambda: subprocess.run(["umount", "--recursive", "--lazy", folder], check=True))
        command = Command(folder, launcher=STANDALONE if drill.on == "torchrun" else [])

        def start() -> Running:
            running = command.start(*small, *words, small=False, log=f"output-{time.time():.0f}.txt")
            stack.callback(running.end)
            return running

        yield Scene(start(), start, folder / "mark", stack, bed)


def run(folder: Path, drill: Drill, names: list[str]) -> Iterator[list[str]]:
    """Yield a row for each of the faults."""
    with staged(folder, drill) as scene:
        for name in names:
            try:
                if drill.faults[name].of_training:
                    scene.wait_until_two_train()
                seconds, text = measure(scene, drill.faults[name])
            except Exception:  # what has been measured is worth showing
                traceback.print_exc()
                seconds, text = None, "the drill itself failed"
            yield [name, "not named" if seconds is None else f"{seconds:.1f}", text.replace("|", "/")]


def _send(number: signal.Signals, *pids: int) -> float:
    struck_s = time.time()
    for pid in pids:
        processes.send(pid, number)
    return struck_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", metavar="FAULT")
    options = parser.parse_args()
    processes.adopt_orphans()
    rows = [["fault", "named after s", "by"]]
    for drill in DRILLS:
        names = [name for name in drill.faults if not options.only or name in options.only]
        if not names:
            continue
        with tempfile.TemporaryDirectory(prefix="named-", ignore_cleanup_errors=True) as folder:
            os.environ |= {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
            try:
                for row in run(Path(folder), drill, names):
                    print(*row, sep=" | ", flush=True)
                    rows.append(row)
            except Exception:
                traceback.print_exc()
    print(table(rows))
    in_time = [row for row in rows[1:] if row[1] != "not named" and float(row[1]) <= LIMIT_S]
    print(f"{len(in_time)} of {len(rows) - 1} within {LIMIT_S:g} s")


if __name__ == "__main__":
    main()
