"""Elastic training on Ray. `python main.py --help` lists what it can do."""

import time

STARTED_S = time.time()

from app.launch.ranks import expect_end, of_torchrun  # noqa: E402 - what the imports take is part of a start's time
from app.run.interrupts import EXIT_STOPPED, stop_by_signals  # noqa: E402

if __name__ == "__main__":
    # Before what follows is imported, which takes seconds on a busy machine.
    if of_torchrun():
        expect_end()  # another rank may fail by then
    else:
        stop_by_signals()

try:
    from app.cli import main
except KeyboardInterrupt:
    raise SystemExit(EXIT_STOPPED) from None

if __name__ == "__main__":
    raise SystemExit(main(STARTED_S))
