"""Elastic training on Ray. `python main.py --help` lists what it can do."""

import time

STARTED_S = time.time()

from app.launch.ranks import expect_end, of_torchrun  # noqa: E402 - what the imports take is part of a start's time

if __name__ == "__main__" and of_torchrun():
    expect_end()  # another rank may fail before this one has imported what follows

from app.cli import main  # noqa: E402

if __name__ == "__main__":
    raise SystemExit(main(STARTED_S))
