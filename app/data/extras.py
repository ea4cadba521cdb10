"""Packages that only some kinds of data need, and that come with an extra of this program."""

import importlib
from typing import Any

from app.errors import ConfigError, Problem


def import_extra(module: str, extra: str, key: str) -> Any:
    """Import a module that the section at `key` needs. Raises ConfigError with what to install if it cannot be."""
    try:
        return importlib.import_module(module)
    # Of another release than torch's, torchvision raises a RuntimeError.
    except (ImportError, RuntimeError) as error:
        what = f"needs {module.partition('.')[0]}: pip install -c constraints.txt -e '.[{extra}]' ({error})"
        raise ConfigError([Problem("", f"{key}.kind", what)]) from error
