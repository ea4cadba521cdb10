"""States that outlive an attempt: content, checkpoints, snapshots and restore."""
