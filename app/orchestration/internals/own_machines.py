"""Clusters of one's own machines (provider local), which Ray remembers only where `ray up` was given."""

from __future__ import annotations

from typing import Any

from ray.autoscaler._private.local.node_provider import LocalNodeProvider, record_local_head_state_if_needed


def remember_head(cluster: dict[str, Any]) -> None:
    """Lets Ray's commands find the head of `cluster`, a parsed cluster file, from this machine too."""
    record_local_head_state_if_needed(LocalNodeProvider(cluster["provider"], cluster["cluster_name"]))
