"""`scale RUN --workers MIN:MAX`: other bounds for a run that is under way.

The wish is left in the run directory, which every node sees, so it needs neither Ray nor its address or token.
"""

from __future__ import annotations

import re
import time

from app.errors import RunConflict, UsageError
from app.owner import read_owner
from app.rundir import find_run

_ANSWER_S = 20.0
_POLL_S = 0.1


def scale(run: str, workers: str) -> str:
    """Waits for the running command to take the wish up. Returns the line to print.

    Args:
        run: see `find_run`.
        workers: "2:8", or "4" for exactly four.

    Raises:
        UsageError: the arguments are not of that form, or there is no such run.
        RunConflict: the run is not under way, or did not answer.
    """
    bounds = re.fullmatch(r"(\d+)(?::(\d+))?", workers)
    smallest, largest = (int(bounds[1]), int(bounds[2] or bounds[1])) if bounds else (0, 0)
    if not 1 <= smallest <= largest:
        raise UsageError(f"--workers {workers}: must be MIN:MAX with 1 <= MIN <= MAX, for example 2:8")
    directory = find_run(run)
    owner = read_owner(directory.store)
    if owner is None or not owner.alive:
        raise RunConflict(f"{directory.uri} is not running; give scaling.num_workers to the command that starts it")
    since = time.time()
    directory.wish_for_scale(smallest, largest)
    while time.time() - since < _ANSWER_S:
        for event in reversed(directory.read_events()):
            if event["event"] == "scale" and event["time_s"] >= since:
                return f"scaling.num_workers of {directory.uri}: {event['before']} -> {event['after']}"
        time.sleep(_POLL_S)
    directory.take_scale()
    raise RunConflict(
        f"{directory.uri} did not answer within {_ANSWER_S:g} s. Under torchrun, and with recovery.mode=restart, the "
        "number of workers changes by a stop and another start"
    )
