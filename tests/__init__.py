"""Tests of the package in this checkout, also where another version of the package is installed."""

import os
import sys
from pathlib import Path

_SOURCE_ROOT = str(Path(__file__).parents[1] / "app")

if _SOURCE_ROOT not in sys.path:
    sys.path.insert(0, _SOURCE_ROOT)
os.environ["PYTHONPATH"] = _SOURCE_ROOT  # for programs that tests start
