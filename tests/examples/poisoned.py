"""User code that does not survive one node of the cluster."""

import os
from pathlib import Path
from typing import Any

import ray

from steadfast.config import TextData
from steadfast.data.datasets import Dataset, build_dataset


def dataset(folder: str, **args: Any) -> Dataset:
    """The usual text, but the process ends on the node that the file `poisoned` names. Every call leaves a line."""
    node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else "driver"
    with (Path(folder) / "placements").open("a") as file:
        file.write(f"{node}\n")
    if node == (Path(folder) / "poisoned").read_text():
        os._exit(1)
    return build_dataset(TextData(**args))
