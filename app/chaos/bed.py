"""A Ray cluster of several nodes on one machine, which can be added, announced to go, and taken away."""

from __future__ import annotations

import time
from typing import Any

from ray.cluster_utils import Cluster

from app.orchestration.internals.nodes import drain

_STORE_BYTES = 80 * 2**20  # nothing large travels through Ray's object store


class Bed:
    """A head without room for workers, and nodes of one CPU each."""

    def __init__(self) -> None:
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": _STORE_BYTES}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes: list[Any] = []

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self) -> None:
        self.nodes.append(self._cluster.add_node(num_cpus=1, object_store_memory=_STORE_BYTES))

    def drain(self, notice_s: float) -> None:
        """Announces that the newest node goes, as a cloud does that reclaims it, and takes it away in time."""
        until = time.time() + notice_s
        drain(self.address, self.nodes[-1].node_id, until)
        time.sleep(until - time.time())
        self.remove()

    def remove(self) -> None:
        """Takes the newest node away at once."""
        self._cluster.remove_node(self.nodes.pop())

    def close(self) -> None:
        self._cluster.shutdown()
