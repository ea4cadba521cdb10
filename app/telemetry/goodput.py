"""What the time of a run was worth, from what was written down while it ran."""

from collections.abc import Callable
from itertools import pairwise

from app.run.directory import RunDirectory
from app.run.events import RunStarted
from app.run.ledger import Totals


def read_totals(directory: RunDirectory, mark: Callable[[], object] = lambda: None) -> Totals:
    """Read what a run's ledger and events come to, however long they are."""
    starts_s = sorted(event.time_s or 0.0 for event in directory.all_events() if isinstance(event, RunStarted))
    totals = Totals.read(directory.store, starts_s, mark)
    # A command that was killed has no event of its end. What it wrote last, a step or an event, is taken for it.
    for event in directory.all_events():
        totals.add_event(event.time_s or 0.0)
    return totals


def goodput(totals: Totals) -> dict[str, float]:
    """Return the seconds of a run and, as `goodput`, the share of them spent in steps that led to its result."""
    wall_s = 0.0
    for start_s, end_s in zip(totals.starts_s, totals.ends_s, strict=True):
        wall_s += max(0.0, end_s - start_s)
    return {
        "wall_s": round(wall_s, 3),
        "stall_s": round(_stall_s(totals), 3),
        "goodput": round(totals.productive_s / wall_s, 4) if wall_s else 0.0,
    }


def _stall_s(totals: Totals) -> float:
    """Return the time between attempts of one command in which no step ended."""
    stall_s = 0.0
    for old, new in pairwise(sorted(totals.spans.values(), key=lambda span: span.first_s)):
        # The time between two commands is the user's own: the run did not exist then.
        if not any(old.last_s < start_s <= new.first_s for start_s in totals.starts_s):
            stall_s += max(0.0, new.first_s - new.first_step_s - old.last_s)
    return stall_s
