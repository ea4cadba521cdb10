"""A task that writes down what its worker has been given."""

import json
import os
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from steadfast.tasks import LanguageModeling


class Seen(LanguageModeling):
    """Writes a file for each worker: its variables of these `names`, and the version of `package` if it has it."""

    def __init__(self, folder: str, names: list[str], package: str = "none") -> None:
        found = {name: os.environ.get(name) for name in names}
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
        Path(folder).mkdir(exist_ok=True)
        (Path(folder) / f"{socket.gethostname()}-{os.getpid()}.json").write_text(json.dumps(found))
