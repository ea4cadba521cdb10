"""Elastic training on Ray, from a checkout. `python main.py --help` lists the verbs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "app"))  # before another version that is installed

from steadfast.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main())
