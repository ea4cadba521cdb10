"""The command: `steadfast`, `python -m steadfast`, and `python main.py` in a checkout."""

import time

STARTED_S = time.time()

from steadfast.launch.ranks import expect_end, of_torchrun  # noqa: E402 - a start's time includes these imports
from steadfast.run.interrupts import EXIT_STOPPED, stop_by_signals, stop_requested  # noqa: E402


def main() -> int:
    """Run the verb of the command line and return the exit code."""
    # Signals are handled before the other imports, which take seconds on a busy machine.
    stop_by_signals()
    if of_torchrun():
        expect_end()  # another rank may fail during the imports
    try:
        from steadfast.cli import main as run

        return run(STARTED_S)
    except KeyboardInterrupt:
        return EXIT_STOPPED
    except Exception:
        # An import that a signal has interrupted may fail in other ways.
        if stop_requested():
            return EXIT_STOPPED
        raise


if __name__ == "__main__":
    raise SystemExit(main())
