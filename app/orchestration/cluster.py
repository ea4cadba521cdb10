"""Which Ray a run uses, and whether it has room for the run."""

import contextlib
import logging
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import ray
import yaml

from app.config import Config
from app.errors import ResourcesMissing, TrainingError, UsageError
from app.orchestration.internals import (
    current_cluster,
    end_at_once,
    keep_sigterm_handler,
    on_loopback,
    silence_raylet,
)
from app.orchestration.packages import check_packages
from app.orchestration.runtime_env import runtime_env
from app.run.interrupts import Interrupts
from app.run.owner import Ownership

EMBEDDED = "embedded"
_LOOPBACK = "127.0.0.1"
# Defaults for Ray's own settings; what the user has set in the environment wins.
_RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths mean what they mean to the user
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # how soon a dead worker is noticed; stock is 2
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}
_STORE_BYTES = 100 * 2**20  # nothing large travels through Ray's object store
_AUTOSCALER = Path("~/ray_bootstrap_config.yaml")  # of the head of a cluster of `ray up`
_POLL_S = 0.5
_ANSWER_S = 10.0  # in which a cluster that was named must answer
_ADDRESS = re.compile(r"(?:ray://)?(\[[0-9a-fA-F:.]+\]|[\w.-]+):(\d{1,5})/?")
# The first bytes of any client of gRPC: HTTP/2's preface, and its settings, none. A server answers with its own.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
# Who says where the cluster is -> how to say otherwise.
_CORRECT = {
    "cluster.address": "in the configuration",
    "RAY_ADDRESS": "in the environment",
    "ray_current_cluster": "in /tmp/ray, by ray stop, and ray start where it belongs to a cluster",
}
_SETTINGS = 4  # the type of that frame, the fourth byte of its head


class RayNotStarted(TrainingError):
    """Ray has not come up, or has refused this process."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}. {remedy}")
        self.what = what
        self.remedy = remedy


def connect(config: Config, verbose: bool) -> str:
    """Join the cluster that the rule of the README names, or embed one in this process. Return which.

    Raises:
        RayNotStarted: Ray's own words in one line, and what to do.
        UsageError: a cluster was named, and nothing answers there.
    """
    for name, value in _RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    quiet: dict[str, Any] = {"log_to_driver": verbose, "logging_level": logging.INFO}
    if not verbose:
        quiet["logging_level"] = logging.ERROR
        silence_raylet()
    keep_sigterm_handler()
    address = find_cluster(config.cluster.address)
    if address is not None:
        check_packages(config.cluster.pip, Path.cwd())
        _init(address=address, runtime_env=runtime_env(config.cluster), **quiet)
        return address
    with on_loopback():
        _init(
            address="local",
            # More workers than cores is slow, not wrong.
            num_cpus=max(os.cpu_count() or 1, config.scaling.min_workers * config.scaling.cpus_per_worker),
            include_dashboard=False,
            object_store_memory=_STORE_BYTES,
            _node_ip_address=_LOOPBACK,
            **quiet,
        )
    end_at_once()
    return EMBEDDED


def _init(**options: Any) -> None:
    try:
        ray.init(**options)
    except Exception as error:
        said = str(error).partition("\n")[0].rstrip(". ")
        raise RayNotStarted(
            f"Ray cannot be started or joined: {said}",
            "On a very busy machine its start takes longer than it allows itself: give the same command again when "
            "less is going on (-v shows Ray's messages and the traceback)",
        ) from error


def find_cluster(wanted: str) -> str | None:
    """Return the address of the cluster for a value of `cluster.address`; None to embed one.

    Raises:
        UsageError: a cluster was named, and nothing answers there.
    """
    named, by = wanted, "cluster.address"
    if wanted == "auto":
        named, by = os.environ.get("RAY_ADDRESS") or "auto", "RAY_ADDRESS"
    if named == "local":
        return None
    if named == "auto":
        found = current_cluster()
        # What `ray start` wrote down may be left of a cluster that was killed. One that is only slow must not be taken
        # for that: the run would train on the head alone.
        if found is None or _refuses(found):
            return None
        named, by = found, "ray_current_cluster"
    if not _ADDRESS.fullmatch(named):
        raise UsageError(
            f"{by}={named} is no address: it must be HOST:PORT, as `ray start --head` prints it, auto or local"
        )
    if not _answers(named, _ANSWER_S):
        raise UsageError(
            f"{by}={named}: no Ray answers there after {_ANSWER_S:g} s. Start it (ray start --head --port=6379), open "
            f"the port, correct {by} ({_CORRECT[by]}), or train on this machine alone with cluster.address=local"
        )
    return named


def _refuses(address: str) -> bool:
    """Return whether nothing listens at an address, as its machine says."""
    host, port = _split(address)
    try:
        socket.create_connection((host, port), timeout=2.0).close()
    except ConnectionRefusedError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _split(address: str) -> tuple[str, int]:
    match = _ADDRESS.fullmatch(address)
    return (match[1].strip("[]"), int(match[2])) if match else ("", 0)


def _answers(address: str, within_s: float) -> bool:
    """Return whether a server of gRPC listens at an address, tried at least once."""
    host, port = _split(address)
    until_s = time.monotonic() + within_s
    while True:
        # Ray's own client would warn for a minute.
        with contextlib.suppress(OSError, OverflowError):
            if _is_grpc_server(host, port):
                return True
        if time.monotonic() >= until_s:
            return False
        time.sleep(_POLL_S)


def _is_grpc_server(host: str, port: int) -> bool:
    with socket.create_connection((host, port), timeout=2.0) as connection:
        if os.environ.get("RAY_USE_TLS", "0") == "1":
            return True  # that it listens is all that can be seen
        connection.sendall(_PREFACE)
        head = connection.recv(9)
        return len(head) > 3 and head[3] == _SETTINGS


def describe_cluster(address: str) -> str:
    num_nodes = len(_nodes())
    free = ray.available_resources()
    described = f"Ray: {address}, {num_nodes} node{'s' * (num_nodes > 1)}"
    for resource in ("CPU", "GPU"):
        described += f", {_total(resource)} {resource}s"
        # Workers wait for what other commands use.
        if (num_free := int(free.get(resource, 0))) < _total(resource):
            described += f" ({num_free} free)"
    return described


def gpus_per_worker(config: Config, embedded: bool) -> int:
    """Return `scaling.gpus_per_worker`; "auto" is 1 if any node has a GPU, or one that may be started."""
    wanted = config.scaling.gpus_per_worker
    if wanted != "auto":
        return wanted
    nodes = _nodes()
    if not embedded:
        nodes += startable()
    return int(any(node.get("GPU", 0) >= 1 for node in nodes))


def startable(config: Path = _AUTOSCALER) -> list[dict[str, float]]:
    """Return the resources of each node that the autoscaler may start: all it ever may, whether they run or not."""
    nodes: list[dict[str, float]] = []
    with contextlib.suppress(OSError):
        cluster = yaml.safe_load(config.expanduser().read_text())
        for name, node_type in cluster.get("available_node_types", {}).items():
            if name != cluster.get("head_node_type"):
                nodes += node_type.get("max_workers", 0) * [node_type["resources"]]
    return nodes


def await_room(config: Config, gpus: int, ownership: Ownership, interrupts: Interrupts, embedded: bool) -> int:
    """Wait until the smallest number of workers fits. Return how many fit, at most as many as are wanted.

    Raises:
        ResourcesMissing: it did not within `scaling.start_timeout_s`, or never will; says what is missing.
    """
    scaling = config.scaling
    # An embedded cluster cannot grow. One that grows when it is asked to need not have grown: the slots will ask.
    patience_s = 0.0 if embedded else scaling.start_timeout_s
    began_s = time.monotonic()
    while True:
        interrupts.check()
        fitting = _num_fitting(_nodes(), scaling.cpus_per_worker, gpus)
        promised = 0 if embedded else _num_fitting(startable(), scaling.cpus_per_worker, gpus)
        if max(fitting, promised) >= scaling.min_workers:
            return max(scaling.min_workers, min(fitting, scaling.num_workers[1]))
        if time.monotonic() - began_s >= patience_s:
            autoscaled = f", and all that the autoscaler may start for {promised}" if promised else ""
            raise ResourcesMissing(
                f"scaling.num_workers asks for at least {scaling.min_workers} workers of {scaling.cpus_per_worker} CPU "
                f"and {gpus} GPU each, but after {patience_s:g} s {len(_nodes())} node(s) with {_total('CPU')} CPUs "
                f"and {_total('GPU')} GPUs have room for {fitting}{autoscaled}. "
                "Add nodes, or lower scaling.num_workers or scaling.gpus_per_worker"
            )
        ownership.renew()
        time.sleep(_POLL_S)


def _nodes() -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _total(resource: str) -> int:
    return int(ray.cluster_resources().get(resource, 0))


def _num_fitting(nodes: list[dict[str, float]], cpus: int, gpus: int) -> int:
    num_workers = 0
    for node in nodes:
        fitting = node.get("CPU", 0) // cpus
        if gpus:
            fitting = min(fitting, node.get("GPU", 0) // gpus)
        num_workers += int(fitting)
    return num_workers
