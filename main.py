"""Elastic training on Ray, from a checkout. `python main.py --help` lists the verbs."""

import os
import sys
from pathlib import Path

# This checkout comes before another version that is installed, also in the processes of an embedded Ray.
SOURCES = str(Path(__file__).resolve().parent / "app")
sys.path.insert(0, SOURCES)
paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if SOURCES not in paths:
    os.environ["PYTHONPATH"] = os.pathsep.join([SOURCES, *filter(None, paths)])

from steadfast.__main__ import main  # noqa: E402 - found by the path above

if __name__ == "__main__":
    raise SystemExit(main())
