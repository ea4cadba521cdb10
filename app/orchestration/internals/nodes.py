"""Nodes that are about to go. Ray keeps the list but has no public way to read it, nor to add to it."""

from __future__ import annotations

import ray._private.state
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated import autoscaler_pb2


def draining() -> dict[str, float]:
    """Node id -> Unix time at which the node goes; 0 where nobody said when."""
    found: dict[str, int] = ray._private.state.state.get_draining_nodes()
    return {node: deadline_ms / 1000 for node, deadline_ms in found.items()}


def drain(gcs_address: str, node_id: str, until_s: float) -> None:
    """Announces that a node is preempted at a Unix time.

    Raises:
        RuntimeError: Ray refused, and why.
    """
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, why = GcsClient(address=gcs_address).drain_node(node_id, reason, "preempted", int(until_s * 1000))
    if not accepted:
        raise RuntimeError(f"node {node_id} is not drained: {why}")
