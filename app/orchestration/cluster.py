"""Which Ray a run uses, and whether it has room for it."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import Any

import ray

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
            ray.init(address=address, **quiet)
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


def gpus_per_worker(config: Config) -> int:
    wanted = config.scaling.gpus_per_worker
    return (1 if ray.cluster_resources().get("GPU", 0) >= 1 else 0) if wanted == "auto" else wanted


def await_room(config: Config, gpus: int, ownership: Ownership, interrupts: Interrupts, embedded: bool) -> int:
    """Waits until the smallest number of workers fits; not at all on an embedded cluster, which cannot grow.

    Returns:
        How many fit, at most as many as are wanted.

    Raises:
        ResourcesMissing: it did not within `scaling.start_timeout_s`; says what is missing.
    """
    scaling = config.scaling
    began, patience = time.monotonic(), 0.0 if embedded else scaling.start_timeout_s
    while True:
        interrupts.check()
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        fitting = sum(
            int(min(node.get("CPU", 0) // scaling.cpus_per_worker, node.get("GPU", 0) // gpus if gpus else 1e9))
            for node in nodes
        )
        if fitting >= scaling.min_workers:
            return min(fitting, scaling.num_workers[1])
        if time.monotonic() - began >= patience:
            raise ResourcesMissing(
                f"scaling.num_workers asks for at least {scaling.min_workers} workers of {scaling.cpus_per_worker} CPU "
                f"and {gpus} GPU each, but after {patience:g} s {len(nodes)} node(s) with "
                f"{_sum(nodes, 'CPU')} CPUs and {_sum(nodes, 'GPU')} GPUs have room for {fitting}. "
                "Add nodes, or lower scaling.num_workers or scaling.gpus_per_worker"
            )
        ownership.renew()
        time.sleep(0.5)


def _sum(nodes: list[dict[str, float]], resource: str) -> int:
    return int(sum(node.get(resource, 0) for node in nodes))
