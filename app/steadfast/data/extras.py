"""Import optional packages that some sections need."""

import importlib
from importlib.util import find_spec
from typing import Any

from steadfast.errors import ConfigError, Problem


def import_extra(module: str, extra: str, key: str) -> Any:
    """Import a module that the configuration key or option `key` needs.

    Raises ConfigError with the command that installs the package if the import fails.
    """
    try:
        return importlib.import_module(module)
    # torchvision raises RuntimeError if it was built for another torch
    except (ImportError, RuntimeError) as error:
        raise _missing(module, extra, key, f" ({error})") from error


def require_extra(module: str, extra: str, key: str) -> None:
    """Check quickly that a package is installed, without an import.

    Raises ConfigError as `import_extra` does.
    """
    if find_spec(module) is None:
        raise _missing(module, extra, key)


def _missing(module: str, extra: str, key: str, why: str = "") -> ConfigError:
    what = f"needs {module.partition('.')[0]}: pip install 'steadfast[{extra}]'{why}"
    return ConfigError([Problem("", key, what)])
