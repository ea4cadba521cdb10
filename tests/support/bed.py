"""A Ray cluster of several nodes on this machine: real raylets that can be added, drained and lost."""

from __future__ import annotations

import logging
import signal
import time
from typing import Any

from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

from tests.support import processes

_STORE_BYTES = 80 * 2**20  # nothing large travels through Ray's object store


class Bed:
    """A head that trains nothing, and nodes with room for one worker each.

    Args:
        head_cpus: cores of the head, for actors that Ray places there. A worker that must not use them asks for `node`.
    """

    def __init__(self, num_nodes: int, head_cpus: int = 0) -> None:
        # It tells that there is another cluster on this machine, to which nobody is to connect without its address.
        logging.getLogger("ray").setLevel(logging.WARNING)
        head = {"num_cpus": head_cpus, "include_dashboard": False, "object_store_memory": _STORE_BYTES}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes: list[str] = []
        for _ in range(num_nodes):
            self.add()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, ip: str | None = None) -> str:
        """Returns the id of the new node, which has an address of its own if one is given."""
        address = {} if ip is None else {"node_ip_address": ip}
        node = self._cluster.add_node(num_cpus=1, resources={"node": 1}, object_store_memory=_STORE_BYTES, **address)
        self.nodes.append(str(node.node_id))
        return self.nodes[-1]

    def lose(self, node_id: str, graceful: bool = False) -> None:
        """As a power failure does, but that its sockets close; or as somebody who switches it off properly."""
        self.nodes.remove(node_id)
        node = next(node for node in self._cluster.worker_nodes if node.node_id == node_id)
        self._cluster.remove_node(node, allow_graceful=graceful)

    def kill(self, node_id: str) -> None:
        for pid in self.pids_of(node_id):
            processes.send(pid, signal.SIGKILL)
        self.lose(node_id)

    def pids_of(self, node_id: str) -> list[int]:
        return self._below(next(node for node in self._cluster.worker_nodes if node.node_id == node_id))

    def pids(self) -> set[int]:
        found: set[int] = set()
        for node in [self._cluster.head_node, *self._cluster.worker_nodes]:
            found.update(self._below(node))
        return found

    def _below(self, node: Any) -> list[int]:
        (raylet,) = node.all_processes["raylet"]
        return [raylet.process.pid, *processes.descendants(raylet.process.pid)]

    def drain(self, node_id: str, seconds: float) -> float:
        """Announces that the node will go in so many seconds. Returns when, as Unix time."""
        deadline_s = time.time() + seconds
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        gcs = GcsClient(address=self.address)
        accepted, why = gcs.drain_node(node_id, reason, "preempted", int(deadline_s * 1000))
        assert accepted, f"node {node_id} is not drained: {why}"
        return deadline_s

    def __enter__(self) -> Bed:
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.shutdown()
