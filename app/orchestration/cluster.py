"""Which Ray a run uses, and whether it has room for it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import ray
import yaml

from app.config import Config
from app.errors import ResourcesMissing
from app.interrupts import Interrupts
from app.orchestration.internals import hush
from app.owner import Ownership

# Defaults for Ray's own settings; what the user has set in the environment wins.
_RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths mean what they mean to the user
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # how soon a dead worker is noticed; stock is 2
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}
EMBEDDED = "embedded"
_STORE_BYTES = 100 * 2**20  # nothing large travels through Ray's object store
_AUTOSCALER = Path("~/ray_bootstrap_config.yaml")  # of the head of a cluster of `ray up`


def connect(config: Config, verbose: bool) -> str:
    """Joins the cluster that the rule of the README names, or embeds one in this process. Returns which."""
    for name, value in _RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    if not verbose:
        hush()
    quiet: dict[str, Any] = {
        "log_to_driver": verbose,
        "logging_level": logging.INFO if verbose else logging.ERROR,
    }
    address = config.cluster.address
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "auto")
    if address != "local":
        with contextlib.suppress(ConnectionError) if address == "auto" else contextlib.nullcontext():
            ray.init(address=address, runtime_env=_code(), **quiet)
    if not ray.is_initialized():
        needed = config.scaling.min_workers * config.scaling.cpus_per_worker
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, needed),  # more workers than cores is slow, not wrong
            include_dashboard=False,
            object_store_memory=_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            **quiet,
        )
        address = EMBEDDED
    return address


def describe_cluster(address: str) -> str:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    total = ray.cluster_resources()
    return (
        f"Ray: {address}, {len(nodes)} node{'s' * (len(nodes) > 1)}, "
        f"{int(total.get('CPU', 0))} CPUs, {int(total.get('GPU', 0))} GPUs"
    )


def _code() -> dict[str, Any]:
    """The working directory goes to every node, those that come later too, and is what its workers import from."""
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
    if "working_dir" in job.get("runtime_env", {}):  # `ray job submit --working-dir` has seen to it
        return {}
    return {"working_dir": os.getcwd(), "excludes": [".git", ".venv", "runs", "__pycache__"]}


def gpus_per_worker(config: Config, embedded: bool) -> int:
    wanted = config.scaling.gpus_per_worker
    if wanted != "auto":
        return wanted
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return 1 if any(node.get("GPU", 0) >= 1 for node in (*alive, *([] if embedded else startable()))) else 0


def startable(config: Path = _AUTOSCALER) -> list[dict[str, float]]:
    """Resources of each node that the autoscaler may start: all it ever may, whether they run or not."""
    with contextlib.suppress(OSError):
        cluster = yaml.safe_load(config.expanduser().read_text())
        return [
            node_type["resources"]
            for name, node_type in cluster.get("available_node_types", {}).items()
            if name != cluster.get("head_node_type")
            for _ in range(node_type.get("max_workers", 0))
        ]
    return []


def await_room(config: Config, gpus: int, ownership: Ownership, interrupts: Interrupts, embedded: bool) -> int:
    """Waits until the smallest number of workers fits; not at all where the cluster cannot grow, as an embedded one,
    or grows only when asked: there the slots ask.

    Returns:
        How many fit, at most as many as are wanted.

    Raises:
        ResourcesMissing: it did not within `scaling.start_timeout_s`, or never will; says what is missing.
    """
    scaling = config.scaling
    began, patience = time.monotonic(), 0.0 if embedded else scaling.start_timeout_s
    while True:
        interrupts.check()
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        fitting, promised = _fitting(nodes, config, gpus), _fitting([] if embedded else startable(), config, gpus)
        if max(fitting, promised) >= scaling.min_workers:
            return max(scaling.min_workers, min(fitting, scaling.num_workers[1]))
        if time.monotonic() - began >= patience:
            raise ResourcesMissing(
                f"scaling.num_workers asks for at least {scaling.min_workers} workers of {scaling.cpus_per_worker} CPU "
                f"and {gpus} GPU each, but after {patience:g} s {len(nodes)} node(s) with "
                f"{_sum(nodes, 'CPU')} CPUs and {_sum(nodes, 'GPU')} GPUs have room for {fitting}"
                + (f", and all that the autoscaler may start for {promised}" if promised else "")
                + ". Add nodes, or lower scaling.num_workers or scaling.gpus_per_worker"
            )
        ownership.renew()
        time.sleep(0.5)


def _fitting(nodes: list[dict[str, float]], config: Config, gpus: int) -> int:
    cpus = config.scaling.cpus_per_worker
    return sum(
        int(min(node.get("CPU", 0) // cpus, node.get("GPU", 0) // gpus if gpus else node.get("CPU", 0)))
        for node in nodes
    )


def _sum(nodes: list[dict[str, float]], resource: str) -> int:
    return int(sum(node.get(resource, 0) for node in nodes))
