"""Everything of Ray that is not public API. tests/cluster/test_internals.py fails first when an upgrade moves it."""

from __future__ import annotations

from ray._private.ray_logging import global_worker_stdstream_dispatcher


def hush() -> None:
    """Keeps the raylet's messages off the terminal: `log_to_driver=False` does not cover them, and what matters of
    them the run says itself. They remain in Ray's log files."""
    global_worker_stdstream_dispatcher.remove_handler("ray_print_logs")
