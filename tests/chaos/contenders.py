"""The contenders: how each is started, what its workers and its nodes are, and what it leaves."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steadfast.errors import UsageError
from tests.chaos.matrix import FAULTS, LIMIT_S, Fault
from tests.support import processes

OURS, RAY_TRAIN, TORCHRUN, TORCHFT = "steadfast", "Ray Train", "torchrun", "torchft"
RAY_TORCHFT = f"{RAY_TRAIN}, TorchftConfig"
# As in the README of torchft, except that a group is dead after a second of silence, not after five.
LIGHTHOUSE = {"min_replicas": 1, "quorum_tick_ms": 100, "join_timeout_ms": 10000, "heartbeat_timeout_ms": 1000}
_TORCHRUN = ("-m", "torch.distributed.run")
_ALONE = (*_TORCHRUN, "--standalone", "--nproc-per-node", "1")
_STANDALONE = (*_TORCHRUN, "--standalone", "--nproc-per-node", "2")


@dataclass
class Contender:
    """A command, and eyes on what it does. Nodes are those of a Ray cluster; torchrun's are agents of its own.

    Args:
        folder: where its steps.jsonl lies.
        worker: what the titles of its training processes hold.
    """

    name: str
    folder: Path
    command: tuple[str, ...]
    worker: str
    bed: Any = None
    coordinator: str = ""  # what the title of the process holds that decides for all
    faults: tuple[Fault, ...] = FAULTS
    environment: dict[str, str] = field(default_factory=dict)
    start_nodes: int = 2
    lost_node: int = -1  # place of the node that is lost, in the order of their starts
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        """The first time, or once more after it has failed; with as many nodes as at the start."""
        while self.bed and len(self.bed.nodes) < self.start_nodes:
            self.bed.add()
        self._spawn()

    def restore_nodes(self, number: int) -> None:
        """Add or remove nodes until there are so many."""
        while self.num_nodes < number:
            self.add()
        while self.num_nodes > number:
            self.remove()

    def worker_pids(self) -> list[int]:
        titles = processes.descendants().items()
        return [pid for pid, title in titles if self.worker in title and _TORCHRUN[1] not in title]

    def coordinator_pids(self) -> list[int]:
        own = self.bed.pids()
        return [pid for pid, title in processes.descendants().items() if pid in own and self.coordinator in title]

    def replace_node(self) -> None:
        """Kill all processes of a node at once. Another node takes its place."""
        self.bed.kill(self.bed.nodes[self.lost_node])
        self.add()

    def node_pids(self) -> list[int]:
        found: list[int] = self.bed.pids_of(self.bed.nodes[self.lost_node])
        return found

    @property
    def num_nodes(self) -> int:
        """Each has room for one worker."""
        return len(self.bed.nodes) if self.bed else 2

    def add(self) -> None:
        self.bed.add()

    def drain(self, notice_s: float) -> None:
        """Announces that a node goes, and takes it away when it was said to."""
        until_s = self.bed.drain(self.bed.nodes[self.lost_node], notice_s)
        time.sleep(until_s - time.time())
        self.remove()

    def remove(self) -> None:
        self.bed.lose(self.bed.nodes[self.lost_node], graceful=True)

    def code(self) -> int | None:
        """Its exit code once it has ended; of several processes the first one's."""
        return self.running[0].poll() if self.running else None

    def stop(self) -> None:
        processes.end([process.pid for process in self.running] + self.worker_pids())
        for process in self.running:
            process.wait()
        self.running.clear()

    def _spawn(self, *words: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder.parent / f"{self.folder.name}.log").open("ab") as log:
            self.running.append(
                subprocess.Popen(
                    [sys.executable, *self.command, *words],
                    env={**os.environ, "OMP_NUM_THREADS": "1", **self.environment},
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # a Ctrl-C is for the matrix, which ends all of them
                )
            )


class Agents(Contender):
    """torchrun with one agent a node. It has no notice of a node's end but SIGTERM, which is what its agent gets."""

    def start(self) -> None:
        for _ in range(2):
            self.add()

    @property
    def num_nodes(self) -> int:
        return len(self.running)

    def restore_nodes(self, number: int) -> None:
        while self.running and self.num_nodes < number:
            self.add()
        while self.num_nodes > number:
            self.remove()

    def coordinator_pids(self) -> list[int]:
        """Return the agent that has the store in which all meet."""
        return [self.running[0].pid]

    def node_pids(self) -> list[int]:
        pid = self.running[-1].pid
        return [pid, *processes.descendants(pid)]

    def replace_node(self) -> None:
        for pid in self.node_pids():
            processes.send(pid, signal.SIGKILL)
        self.running.pop().wait()
        self.add()

    def add(self) -> None:
        self._spawn()

    def drain(self, notice_s: float) -> None:
        until = time.monotonic() + notice_s
        self.running[-1].send_signal(signal.SIGTERM)
        time.sleep(until - time.monotonic())
        self._end(self.running.pop())

    def remove(self) -> None:
        self._end(self.running.pop())

    def _end(self, agent: subprocess.Popen[bytes]) -> None:
        processes.end([agent.pid])
        agent.wait()


class ReplicaGroups(Agents):
    """torchft: an agent of torchrun for each replica group, and a lighthouse, which outlives all commands.

    Args:
        port: of the lighthouse.
    """

    port: int = 0
    _lighthouse: subprocess.Popen[bytes] | None = None

    def add(self) -> None:
        """Start a replica group. Of two groups each keeps its number when its node is replaced."""
        taken = {process.args[-1] for process in self.running}  # type: ignore[index]
        self._spawn(min({"0", "1"} - taken))

    def start(self) -> None:
        if self._lighthouse is None:
            settings = [word for name, value in LIGHTHOUSE.items() for word in (f"--{name}", str(value))]
            program = str(Path(sys.executable).with_name("torchft_lighthouse"))
            self._lighthouse = subprocess.Popen(
                [program, "--bind", f"127.0.0.1:{self.port}", *settings],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        super().start()

    def code(self) -> int | None:
        """Return the exit code of the last group to end. One that has ended alone is missed by no other one."""
        codes = [process.poll() for process in self.running]
        return None if None in codes else max(codes, key=abs, default=None)  # type: ignore[arg-type]

    def stop(self) -> None:
        super().stop()
        if self._lighthouse is not None:
            processes.end([self._lighthouse.pid])
            self._lighthouse.wait()
            self._lighthouse = None


def ours(words: list[str], folder: Path, bed: Any, pace_file: str, run: str = OURS) -> Contender:
    task = f'task={{target: "tests.support.pace:Paced", args: {{file: "{pace_file}"}}}}'
    place = [f"run.storage={folder}", f"run.name={run}", f"cluster.address={bed.address}"]
    return Contender(OURS, folder / run, ("main.py", *words, task, *place), "ray::SlotWorker", bed, "Coordinator")


def ours_undisturbed(words: list[str], folder: Path, run: str = "undisturbed") -> Contender:
    """The same loop without Ray, which starts sooner, in one worker: the result is that of any number of them."""
    place = (f"run.storage={folder}", f"run.name={run}", "checkpoint.every=1 epochs")
    return Contender(f"{OURS}, undisturbed", folder / run, (*_ALONE, "main.py", *words, *place), f"name={run}")


def ray_train(job: Path, bed: Any, settings: str = "recommended") -> Contender:
    """Recommended: failures are looked for four times as often as by default, and silence is one.

    With "notice", all ranks ask in each step whether a node is about to go, and save once it is.
    """
    if settings == "torchft":
        _require_torchft()
    tuned = {
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
        "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": str(LIMIT_S),
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "15",  # waited out when a drained node still counts
        "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
    }
    command = ("-m", "tests.chaos.ray_loop", str(job), bed.address, settings)
    found = Contender(RAY_TRAIN, job.with_suffix(""), command, "ray::RayTrainWorker", bed, "TrainController")
    if settings == "default":
        return _by_default(found)
    found.environment = tuned
    if settings == "torchft":
        found.name = RAY_TORCHFT
    if settings == "notice":
        found.name = f"{RAY_TRAIN}, saves on notice"
        found.faults = tuple(fault for fault in FAULTS if fault.name == "drain")
    return found


def torchft(job: Path) -> Contender:
    """Two replica groups of one worker, each restarted by an agent of its own, as torchft's launcher starts them."""
    _require_torchft()
    command = (*_TORCHRUN, "--standalone", "--nproc-per-node", "1", "--max-restarts", "100")
    loop = ("-m", "tests.chaos.torchft_loop", str(job))
    found = ReplicaGroups(TORCHFT, job.with_suffix(""), (*command, *loop), loop[1])
    found.port = _free_port()
    found.environment = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{found.port}"}
    return found


def _require_torchft() -> None:
    if importlib.util.find_spec("torchft") is None:
        raise UsageError("torchft is not installed; give `pip install --no-deps torchft==0.2.0`")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def torchrun(job: Path) -> Contender:
    """Elastic, with time-outs a fraction of their defaults, so that the commonest faults cost it least."""
    port = _free_port()
    elastic = ("--nnodes", "1:3", "--nproc-per-node", "1", "--max-restarts", "100", "--rdzv-backend", "c10d")
    rendezvous = ("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "chaos")
    swift = ("--rdzv-conf", "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3")
    command = (*_TORCHRUN, *elastic, *rendezvous, *swift, *_loop(job))
    found = Agents(TORCHRUN, job.with_suffix(""), command, "tests.chaos.torchrun_loop")
    # Workers that share the agents' store may wait for each other for ever (pytorch issue 135712).
    found.environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return found


def torchrun_by_default(job: Path) -> Contender:
    return _by_default(_standalone_loop(TORCHRUN, job))


def baseline_undisturbed(job: Path) -> Contender:
    return _standalone_loop("baselines, undisturbed", job)


def _standalone_loop(name: str, job: Path) -> Contender:
    return Contender(name, job.with_suffix(""), (*_STANDALONE, *_loop(job)), "tests.chaos.torchrun_loop")


def _loop(job: Path) -> tuple[str, ...]:
    return ("-m", "tests.chaos.torchrun_loop", str(job))


def _by_default(contender: Contender) -> Contender:
    contender.name, contender.faults = f"{contender.name}, defaults", FAULTS[:1]
    return contender
