"""Nodes that are about to go. Ray keeps the list but has no public way to read it."""

from __future__ import annotations

import ray._private.state


def draining() -> dict[str, float]:
    """Node id -> Unix time at which the node goes; 0 where nobody said when."""
    found: dict[str, int] = ray._private.state.state.get_draining_nodes()
    return {node: deadline_ms / 1000 for node, deadline_ms in found.items()}
