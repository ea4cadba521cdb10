"""Hand environment variables to a command that another process starts, and show them to nobody else.

They are on no command line, which every user of a machine can read, and in no record that Ray keeps of a job.
"""

import os
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path


def write_variables(variables: Mapping[str, str]) -> Path:
    """Return a new file, which only this user can read, of shell commands that set the variables."""
    descriptor, name = tempfile.mkstemp(prefix="steadfast-")  # with mode 0600
    with os.fdopen(descriptor, "w") as file:
        for variable, value in variables.items():
            file.write(f"export {variable}={shlex.quote(value)}\n")
    return Path(name)


def taking(path: str) -> str:
    """Return the beginning of a shell command that takes the variables from such a file, and deletes it."""
    return f". {path} && rm -f {path} && "
