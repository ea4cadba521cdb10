"""Announcing that a node will be taken away, as a cloud's notice does."""

from __future__ import annotations

from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated import autoscaler_pb2


def drain_node(gcs_address: str, node_id: str, until_s: float) -> None:
    """Tells Ray that a node is preempted at a time since the epoch.

    Raises:
        RuntimeError: Ray refused, and why.
    """
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, why = GcsClient(address=gcs_address).drain_node(node_id, reason, "preempted", int(until_s * 1000))
    if not accepted:
        raise RuntimeError(f"node {node_id} is not drained: {why}")
