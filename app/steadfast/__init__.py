"""Steadfast: elastic training on Ray. Begin with train.py; docs/architecture.md tells how it is built."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steadfast.config import Config as Config
    from steadfast.config import load_config as load_config
    from steadfast.library import Result as Result
    from steadfast.library import fit as fit
    from steadfast.tasks import Sums as Sums

_HOMES = {
    "Config": "steadfast.config",
    "Result": "steadfast.library",
    "Sums": "steadfast.tasks",
    "fit": "steadfast.library",
    "load_config": "steadfast.config",
}


def __getattr__(name: str) -> Any:
    # Imported when they are asked for: the command line, which imports this package too, needs torch much later.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
