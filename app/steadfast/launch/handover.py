"""Pass secret environment variables to a command that another process starts.

A file that only the user can read holds the variables. They stand neither on a command line, which every user of the
machine can read, nor in Ray's records of a job.
"""

import os
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path


def write_variables(variables: Mapping[str, str]) -> Path:
    """Write a file of shell commands that set the variables.

    Return the path. Only this user can read the file.
    """
    descriptor, name = tempfile.mkstemp(prefix="steadfast-")  # mkstemp creates the file with mode 0600
    with os.fdopen(descriptor, "w") as file:
        for variable, value in variables.items():
            file.write(f"export {variable}={shlex.quote(value)}\n")
    return Path(name)


def source_and_delete(path: str) -> str:
    """Return a shell prefix that sets variables and deletes their file.

    The prefix is put before a command.

    Args:
        path: path of a file from `write_variables`, on the machine of the shell, quoted for it.
    """
    return f". {path} && rm -f {path} && "
