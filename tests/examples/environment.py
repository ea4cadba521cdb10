"""A task that writes down what its worker has been given."""

import json
import os
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from steadfast.tasks import LanguageModeling


def write_down(folder: str, names: list[str], package: str = "none") -> None:
    """Write a file for each process: its variables of these `names`, and the version of `package` if it has it."""
    found = {name: os.environ.get(name) for name in names}
    try:
        found[package] = version(package)
    except PackageNotFoundError:
        found[package] = None
    Path(folder).mkdir(exist_ok=True)
    (Path(folder) / f"{socket.gethostname()}-{os.getpid()}.json").write_text(json.dumps(found))


class Seen(LanguageModeling):
    """Writes down what its worker has been given."""

    def __init__(self, folder: str, names: list[str], package: str = "none") -> None:
        write_down(folder, names, package)
