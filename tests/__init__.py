"""Tests of the package in this checkout, also where another version of the package is installed."""

import os
import sys
from pathlib import Path

_SOURCE_ROOT = str(Path(__file__).parents[1] / "app")

if _SOURCE_ROOT not in sys.path:
    sys.path.insert(0, _SOURCE_ROOT)
# For programs that tests start. What the caller names stays: packages may lie there.
_others = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each not in ("", _SOURCE_ROOT)]
os.environ["PYTHONPATH"] = os.pathsep.join([_SOURCE_ROOT, *_others])
