"""Join or embed a Ray cluster, and wait for room there."""

import contextlib
import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import yaml

from steadfast.config import ClusterConfig, ScalingConfig
from steadfast.errors import ResourcesMissing, TrainingError, UsageError
from steadfast.orchestration.internals import (
    current_cluster,
    end_at_once,
    forked_workers,
    keep_sigterm_handler,
    on_loopback,
    ray_folder,
    restored_functions,
    silence_raylet,
    use_own_python,
    without_services,
)
from steadfast.orchestration.packages import check_packages
from steadfast.orchestration.runtime_env import runtime_env
from steadfast.run.interrupts import Interrupts
from steadfast.run.owner import Ownership
from steadfast.units import size

EMBEDDED = "embedded"
_LOOPBACK = "127.0.0.1"
# Defaults for Ray's own settings. A variable that the user has set takes precedence.
_RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # so that relative paths mean the user's files
    "RAY_kill_worker_timeout_milliseconds": "500",  # until a process that does not obey is killed
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # time to notice a dead worker; Ray's default is 2
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # Ray Train would write each printed line to its log a second time
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # the coordinator watches for preemptions
}
_STORE_BYTES = 100 * 2**20  # small, because no large object goes through Ray's object store
_AUTOSCALER = Path("~/ray_bootstrap_config.yaml")  # `ray up` writes this file on the head of a cluster
_FREE_BYTES, _FREE_FILES = 16 * 2**20, 200  # that an embedded Ray needs at least for its sockets and logs
_POLL_S = 0.5
_ANSWER_S = 10.0  # time in which a named cluster must answer
_ADDRESS = re.compile(r"(?:ray://)?(\[[0-9a-fA-F:.]+\]|[\w.-]+):(\d{1,5})/?")
# A gRPC client begins with HTTP/2's preface and an empty SETTINGS frame. A server answers with its own SETTINGS frame.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
# Source of the cluster's address -> the place where the user can correct the address.
_CORRECT = {
    "cluster.address": "in the configuration",
    "RAY_ADDRESS": "in the environment",
    "ray_current_cluster": "in /tmp/ray, by ray stop, then ray start if this machine belongs to a cluster",
}
_SETTINGS = 4  # type of a SETTINGS frame, in the fourth byte of its header


WARNINGS_REMEDY = "A warnings filter makes a warning of Ray an error: remove the filter (PYTHONWARNINGS, -W error)"


class RayNotStarted(TrainingError):
    """Raised when Ray does not start, or refuses this process."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}. {remedy}")
        self.what = what
        self.remedy = remedy


def connect(cluster: ClusterConfig, scaling: ScalingConfig, verbose: bool) -> str:
    """Join a cluster, or embed Ray in this process.

    Return the cluster's address or `EMBEDDED`. docs/guides/commands.md describes which cluster a run joins.

    Raises:
        RayNotStarted: Ray does not start. The message holds the first line of Ray's error, and the remedy.
        UsageError: a cluster was named, and no Ray answers at its address.
    """
    _set_defaults()
    quiet: dict[str, Any] = {"log_to_driver": verbose, "logging_level": logging.INFO}
    if not verbose:
        quiet["logging_level"] = logging.ERROR
        silence_raylet()
    keep_sigterm_handler()
    address = find_cluster(cluster.address)
    if address is not None:
        check_packages(cluster.pip, Path.cwd())
        _init(address=address, runtime_env=runtime_env(cluster), **quiet)
        return address
    _check_space(ray_folder())
    use_own_python()
    forks = forked_workers(scaling.cpus_per_worker, verbose)
    with on_loopback(), without_services(log_monitor=verbose), forks:
        _init(
            address="local",
            # A run may have more workers than the machine has cores. The run is only slower.
            num_cpus=max(os.cpu_count() or 1, scaling.min_workers * scaling.cpus_per_worker),
            include_dashboard=False,
            object_store_memory=_STORE_BYTES,
            _node_ip_address=_LOOPBACK,
            **quiet,
        )
    end_at_once()
    return EMBEDDED


def running_cluster(cluster: ClusterConfig) -> str:
    """Return the address of the Ray that a program of the user's has started or joined.

    Raises:
        UsageError: the configuration has keys that take effect when Ray is started or joined.
    """
    default = ClusterConfig()
    late = [f"cluster.{key}" for key in ("address", "env", "pip") if getattr(cluster, key) != getattr(default, key)]
    if late:
        raise UsageError(
            f"{', '.join(late)}: Ray is running in this program already, and takes these when it starts. Give them to "
            "ray.init (address=, runtime_env=), or call fit before ray.init or after ray.shutdown"
        )
    _set_defaults()
    return str(ray.get_runtime_context().gcs_address)


@contextlib.contextmanager
def restored_settings() -> Iterator[None]:
    """Undo after the context what `connect` and `running_cluster` set in this process."""
    former = {name: os.environ.get(name) for name in _RAY_SETTINGS}
    try:
        with restored_functions():
            yield
    finally:
        for name, value in former.items():
            if value is None:
                os.environ.pop(name, None)


def _set_defaults() -> None:
    for name, value in _RAY_SETTINGS.items():
        os.environ.setdefault(name, value)


def _init(address: str, **options: Any) -> None:
    try:
        ray.init(address=address, **options)
    except Exception as error:
        said = str(error).partition("\n")[0].rstrip(". ")
        what = f"Ray cannot be started: {said}"
        remedy = "If Ray timed out, give the same command again when the machine is less busy"
        if address != "local":
            # `find_cluster` has found a Ray there. Ray's error does not say that the token was refused.
            what = f"Ray at {address} answers, but cannot be joined: {said}"
            remedy = (
                "If the cluster requires a token, set RAY_AUTH_MODE=token and copy ~/.ray/auth_token from its head; "
                "Ray and Python must have the cluster's versions"
            )
        remedy = _remedy(error) or remedy
        raise RayNotStarted(what, f"{remedy} (-v shows Ray's messages and the traceback)") from error


def _check_space(folder: Path) -> None:
    """Check that Ray can write its sockets and logs. Raises RayNotStarted."""
    # Without space Ray starts, and its processes die later without a word.
    while not folder.exists():
        folder = folder.parent
    free = os.statvfs(folder)
    if free.f_bavail * free.f_frsize < _FREE_BYTES or (free.f_files and free.f_favail < _FREE_FILES):
        raise RayNotStarted(
            f"Ray cannot be started: {folder}, where it keeps sockets and logs, has room for "
            f"{size(free.f_bavail * free.f_frsize)} and {free.f_favail} files",
            "Free space there, or set RAY_TMPDIR to a folder with space",
        )


def _remedy(error: Exception) -> str:
    """Return the remedy for an error of `ray.init`, or "" if the error does not show its cause."""
    text = str(error)
    if isinstance(error, Warning) or "error" in os.environ.get("PYTHONWARNINGS", ""):
        return WARNINGS_REMEDY
    if "AF_UNIX path length" in text:
        return "The name of Ray's folder is too long: set RAY_TMPDIR=/tmp, or another short name"
    if "home directory" in text:  # of a user who is not in /etc/passwd
        return "Ray keeps a token in the home directory: set HOME to a folder that can be written"
    if isinstance(error, OSError) and isinstance(error.filename, str):
        at = Path(error.filename)
        # `mkdir` may have failed at a folder above.
        for name, folder in {"HOME": Path("~/.ray").expanduser(), "RAY_TMPDIR": ray_folder()}.items():
            if at.is_relative_to(folder) or folder.is_relative_to(at):
                return f"Ray must be able to write {folder}: set {name} to a folder that can be written"
    return ""


def find_cluster(wanted: str) -> str | None:
    """Return the cluster's address for a value of `cluster.address`.

    The result is None if Ray shall be embedded.

    Raises:
        UsageError: a cluster was named, and no Ray answers at its address.
    """
    named, by = wanted, "cluster.address"
    if wanted == "auto":
        named, by = os.environ.get("RAY_ADDRESS") or "auto", "RAY_ADDRESS"
    if named == "local":
        return None
    if named == "auto":
        found = current_cluster()
        # The address that `ray start` recorded may be that of a killed cluster, so it is checked. Only a refused
        # connection counts: a cluster that is only slow must be used, or the run would train on the head alone.
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
    """Return whether the machine at an address refuses connections to the port."""
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
    if match is None:
        return "", 0
    return match[1].strip("[]"), int(match[2])


def _answers(address: str, within_s: float) -> bool:
    """Return whether a gRPC server answers at an address in time.

    The address is tried at least once.
    """
    host, port = _split(address)
    until_s = time.monotonic() + within_s
    while True:
        # Ray's own client would print warnings for a minute.
        with contextlib.suppress(OSError, OverflowError):
            if _is_grpc_server(host, port):
                return True
        if time.monotonic() >= until_s:
            return False
        time.sleep(_POLL_S)


def _is_grpc_server(host: str, port: int) -> bool:
    with socket.create_connection((host, port), timeout=2.0) as connection:
        if os.environ.get("RAY_USE_TLS", "0") == "1":
            return True  # with TLS this check only sees that the port is open
        connection.sendall(_PREFACE)
        head = connection.recv(9)
        return len(head) > 3 and head[3] == _SETTINGS


def describe_cluster(address: str) -> str:
    num_nodes = len(_nodes())
    free = ray.available_resources()
    described = f"Ray: {address}, {num_nodes} node{'s' * (num_nodes > 1)}"
    for resource in ("CPU", "GPU"):
        described += f", {_total(resource)} {resource}s"
        # The free resources are shown too, because the run must wait for resources that other commands use.
        if (num_free := int(free.get(resource, 0))) < _total(resource):
            described += f" ({num_free} free)"
    return described


def gpus_per_worker(scaling: ScalingConfig, embedded: bool) -> int:
    """Return the number of GPUs for each worker.

    "auto" means 1 if any node has a GPU, or any node that the autoscaler may start. Otherwise "auto" means 0.
    """
    if scaling.gpus_per_worker != "auto":
        return scaling.gpus_per_worker
    nodes = _nodes()
    if not embedded:
        nodes += startable()
    return int(any(node.get("GPU", 0) >= 1 for node in nodes))


def startable(config: Path = _AUTOSCALER) -> list[dict[str, float]]:
    """Return the resources of each node that the autoscaler may start.

    Nodes that run already are included.
    """
    nodes: list[dict[str, float]] = []
    with contextlib.suppress(OSError):
        cluster = yaml.safe_load(config.expanduser().read_text())
        for name, node_type in cluster.get("available_node_types", {}).items():
            if name != cluster.get("head_node_type"):
                nodes += node_type.get("max_workers", 0) * [node_type["resources"]]
    return nodes


def await_room(scaling: ScalingConfig, gpus: int, ownership: Ownership, interrupts: Interrupts, embedded: bool) -> int:
    """Wait until the cluster has room for the run.

    A run needs room for its smallest number of workers. Return the number of workers that fit, within the bounds of
    `scaling.num_workers`.

    Raises:
        ResourcesMissing: the cluster has too little room after `scaling.start_timeout_s`. The message names what is
            missing.
    """
    # An embedded Ray cannot grow, so there is nothing to wait for. With an autoscaler the nodes need not run yet: the
    # pending actors of slots will start them.
    patience_s = 0.0 if embedded else scaling.start_timeout_s
    began_s = time.monotonic()
    while True:
        interrupts.check()
        fitting = _num_fitting(_nodes(), scaling.cpus_per_worker, gpus)
        promised = 0 if embedded else _num_fitting(startable(), scaling.cpus_per_worker, gpus)
        if max(fitting, promised) >= scaling.min_workers:
            return max(scaling.min_workers, min(fitting, scaling.num_workers[1]))
        if time.monotonic() - began_s >= patience_s:
            autoscaled = ""
            if promised:
                autoscaled = f", and all nodes that the autoscaler may start for {promised}"
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
