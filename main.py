"""Elastic training on Ray. `python main.py --help` lists what it can do."""

import time

STARTED_S = time.time()

from app.cli import main  # noqa: E402 - what the imports take is part of how long a start takes

if __name__ == "__main__":
    raise SystemExit(main(STARTED_S))
