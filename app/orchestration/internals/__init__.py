"""Everything of Ray that is not public API. tests/cluster/test_internals.py fails first when an upgrade moves it."""

from __future__ import annotations

from typing import Any

from ray._private import worker


def hush() -> None:
    """Keeps the raylet's messages off the terminal, which `log_to_driver=False` does not. What matters of them the
    run says itself; all of them are in Ray's log files."""

    def say_nothing(data: dict[str, Any], ignore_prefix: bool) -> None:
        pass

    worker.print_to_stdstream = say_nothing


def without_idle_actors(callbacks: list[Any]) -> list[Any]:
    """Ray Train's callbacks less those that start an actor, three seconds of CPU, for what is not used here: a manager
    of Ray Data datasets, and a cleaner of placement groups for controllers that outlive their driver."""
    from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
    from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

    return [each for each in callbacks if not isinstance(each, DatasetsCallback | PlacementGroupCleanerCallback)]
