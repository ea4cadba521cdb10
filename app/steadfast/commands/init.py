"""`init [FOLDER]`: write a starter with a configuration, the user's code and a cluster file."""

import json
import os
import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path

from steadfast.config.describe import json_schema
from steadfast.errors import UsageError
from steadfast.units import printable

_STARTER = Path(__file__).with_name("starter")
_SCHEMA = "train.schema.json"  # train.yaml names this file in its first line


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", default=".", metavar="FOLDER", help="by default the current folder")


def run(options: Namespace) -> int:
    """Write the starter, and print the command that starts training."""
    folder = Path(options.folder)
    files = starter()
    existing = [name for name in files if os.path.lexists(folder / name)]
    if existing:
        raise UsageError(
            f"{folder} already has {', '.join(existing)}; init overwrites no file, and wrote none. Choose another "
            "folder: steadfast init FOLDER"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}; choose another folder") from error
    command = "steadfast --config train.yaml"
    if folder.resolve() != Path.cwd():
        command = f"cd {shlex.quote(str(folder))} && {command}"
    print(
        printable(
            f"wrote {', '.join(files)}\nmine.py has the model, the dataset and the task. Train them:\n  {command}"
        )
    )
    return 0


def starter() -> dict[str, str]:
    """Return the texts of the starter's files by name."""
    # Python may have written a folder __pycache__ beside the files.
    files = {path.name: path.read_text() for path in sorted(_STARTER.iterdir()) if path.is_file()}
    return files | {_SCHEMA: json.dumps(json_schema(), indent=2) + "\n"}
