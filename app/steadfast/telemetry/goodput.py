"""Goodput of a run and its use of time, computed from ledger and events."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from steadfast.run.directory import RunDirectory
from steadfast.run.events import AttemptEnded, AttemptStarted, Event, RunStarted, Waiting
from steadfast.run.ledger import ACTS, Span, Totals

# Every second of a rank belongs to one of these categories. The report shows the texts.
CATEGORIES = {
    "productive": "in steps that count for the result",
    "data wait": "in steps that count, while rank 0 waited for batches",
    "validation": "measuring held-out samples",
    "snapshot": "while training waited for a copy in memory",
    "checkpoint wait": "while training waited for a checkpoint",
    "start-up": "from the start or restart of a command to the next step",
    "detection": "from the last step to the end of a failed attempt or to the restart of the command",
    "re-forming": "forming the next world and building model and data in it",
    "restore": "until every rank had the restored state",
    "redone": "in steps that had to be done again",
    "waiting for workers": "while there were fewer workers than the run needs",
    "idle": "between steps, and from the last step to the end of a command",
}
_CATEGORY_OF_ACT = {"validation": "validation", "snapshot": "snapshot", "checkpoint": "checkpoint wait"}
_PLANNED = ("resized", "stopped", "finished")  # causes of an attempt's end that need no detection


def read_totals(directory: RunDirectory, mark: Callable[[], object] = lambda: None) -> Totals:
    """Sum the times and samples of a run from its ledger and events.

    The ledger may have any length, because it is read in blocks.

    Args:
        directory: the run to read.
        mark: called for each block of the ledger, to show that this process makes progress.
    """
    starts_s = sorted(event.time_s or 0.0 for event in directory.events(RunStarted) if not event.again)
    totals = Totals.read(directory.store, starts_s, mark)
    # A killed command writes no event of its end. Its last step or event marks the end instead.
    for event in directory.all_events():
        totals.add_event(event.time_s or 0.0)
    return totals


def goodput(totals: Totals) -> dict[str, float]:
    """Return wall time, stall time and goodput of a run.

    `wall_s` and `stall_s` are seconds. `goodput` is the share of the wall time spent in steps that count for the
    result.
    """
    wall_s = _wall_s(totals)
    share = 0.0
    if wall_s:
        share = round(totals.productive_s / wall_s, 4)
    return {
        "wall_s": round(wall_s, 3),
        "stall_s": round(_stall_s(totals), 3),
        "goodput": share,
    }


def _wall_s(totals: Totals) -> float:
    return sum(max(0.0, end_s - start_s) for start_s, end_s in zip(totals.starts_s, totals.ends_s, strict=True))


def _stall_s(totals: Totals) -> float:
    """Return the time between attempts of one command in which no step ended."""
    stall_s = 0.0
    for old, new in pairwise(sorted(totals.spans.values(), key=lambda span: span.first_s)):
        # The time between two commands does not count: the run did not exist then.
        if not any(old.last_s < start_s <= new.first_s for start_s in totals.starts_s):
            stall_s += max(0.0, new.first_s - new.first_step_s - old.last_s)
    return stall_s


@dataclass
class Account:
    """Use of time of one attempt, in seconds by category.

    An attempt counts from the last step of the attempt before, or from the start of the command, to its own last
    step. The last attempt of a command counts to the end of the command.
    """

    attempt: int  # 0 for a command without a step
    world_size: int
    began_s: float  # Unix time
    steps_from_s: float = 0.0  # Unix time at which its first step began
    ended_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)  # by category
    rank_s: dict[str, float] = field(default_factory=dict)  # by category, multiplied by the number of ranks

    def add(self, category: str, seconds: float, num_ranks: int) -> None:
        """Add seconds of `num_ranks` ranks to a category."""
        self.seconds[category] = self.seconds.get(category, 0.0) + seconds
        self.rank_s[category] = self.rank_s.get(category, 0.0) + seconds * num_ranks


class TimeLedger:
    """Sorts every second of every rank of a run into one of `CATEGORIES`.

    The number of ranks is that of the attempt under way. The time to detect a failure counts for the ranks of the world
    that failed. From the end of that world to the next first step the ranks of the next world count. The time between
    two commands does not count.

    Attributes:
        accounts: one account for each attempt that finished a step, in the order of time. A command without a step
            has an account too.
    """

    def __init__(self, totals: Totals, events: Iterable[Event]) -> None:
        self._started: dict[int, AttemptStarted] = {}
        self._ended: dict[int, AttemptEnded] = {}
        self._waiting: list[Waiting] = []
        self._again_s: list[float] = []  # Unix times at which a command restarted, oldest first
        for event in events:
            self._learn(event)
        self.accounts: list[Account] = []
        spans = sorted(totals.spans.items(), key=lambda each: each[1].first_s)
        for start_s, end_s in zip(totals.starts_s, totals.ends_s, strict=True):
            own = [(attempt, span) for attempt, span in spans if start_s < span.first_s <= end_s]
            self._add_command(start_s, end_s, own)

    def _learn(self, event: Event) -> None:
        match event:
            case AttemptStarted(attempt=int(attempt)):
                self._started[attempt] = event
            case AttemptEnded(attempt=int(attempt)):
                self._ended.setdefault(attempt, event)
            case Waiting():
                self._waiting.append(event)
            case RunStarted(again=True, time_s=float(time_s)):
                self._again_s.append(time_s)

    def rank_s(self) -> dict[str, float]:
        """Return seconds summed over ranks, in the order of `CATEGORIES`."""
        return summed(self.accounts)

    def _add_command(self, start_s: float, end_s: float, spans: list[tuple[int, Span]]) -> None:
        cursor = _Cursor(start_s)
        before: tuple[int, Span] | None = None
        for attempt, span in spans:
            account = Account(attempt, span.world_size or 1, cursor.now_s)
            self.accounts.append(account)
            category = "start-up"
            if before is not None:
                again = self._add_end(before[0], before[1].world_size or 1, account, cursor, span.first_s)
                if not again:
                    category = "re-forming"
            self._add_start(attempt, span, account, cursor, category)
            _add_steps(span, account, cursor)
            account.ended_s = cursor.now_s
            before = attempt, span
        if before is None:
            self.accounts.append(Account(0, 1, start_s))
            cursor.spend_until(end_s, "start-up", self.accounts[-1])
        else:
            account = self.accounts[-1]
            category = "idle"
            # The command has restarted, and has ended before its next step.
            if self._add_end(before[0], account.world_size, account, cursor, end_s):
                category = "start-up"
            cursor.spend_until(end_s, category, account)
        self.accounts[-1].ended_s = cursor.now_s

    def _add_end(self, attempt: int, num_ranks: int, account: Account, cursor: "_Cursor", until_s: float) -> bool:
        """Add the time from an attempt's last step to its end.

        If its command restarted by `until_s`, the time up to the restart is added too. Return whether the command
        restarted.
        """
        last_step_s = cursor.now_s
        ended = self._ended.get(attempt)
        if ended is not None and ended.time_s is not None:
            # No line of the ledger follows the acts after the last step, so the event has their seconds.
            for act in ACTS:
                seconds = getattr(ended, f"{act}_s") or 0.0
                cursor.spend_until(min(cursor.now_s + seconds, ended.time_s), _CATEGORY_OF_ACT[act], account, num_ranks)
            category = "idle" if ended.cause in _PLANNED else "detection"
            cursor.spend_until(ended.time_s, category, account, num_ranks)
        for again_s in self._again_s:
            if last_step_s <= again_s <= until_s:
                cursor.spend_until(again_s, "detection", account, num_ranks)
                return True
        return False

    def _add_start(self, attempt: int, span: Span, account: Account, cursor: "_Cursor", category: str) -> None:
        """Add the time from the attempt before to this one's first step.

        Time that no event assigns to another category counts as `category`.
        """
        stepping_s = span.first_s - span.first_step_s
        started = self._started.get(attempt)
        if started is not None and started.time_s is not None:
            ready_s = started.time_s - started.first_step_s
            held_s = ready_s - started.restored_s
            formed_s = held_s - started.built_s
            self._add_shortage(formed_s, category, account, cursor)
            # The event is written shortly after the first step has ended, so its phases may reach into this step.
            cursor.spend_until(min(held_s, stepping_s), category, account)
            restore = "restore" if started.step else category
            cursor.spend_until(min(ready_s, stepping_s), restore, account)
        cursor.spend_until(stepping_s, category, account)

    def _add_shortage(self, formed_s: float, category: str, account: Account, cursor: "_Cursor") -> None:
        # The world forms as soon as there are enough workers, so the run waited for workers until then.
        for event in self._waiting:
            if event.time_s is not None and cursor.now_s < event.time_s < formed_s:
                cursor.spend_until(event.time_s - (event.seconds or 0.0), category, account)
                cursor.spend_until(formed_s, "waiting for workers", account)


def summed(accounts: Iterable[Account]) -> dict[str, float]:
    """Return the seconds of all ranks, summed over attempts, in the order of `CATEGORIES`."""
    totals = dict.fromkeys(CATEGORIES, 0.0)
    for account in accounts:
        for category, seconds in account.rank_s.items():
            totals[category] += seconds
    return totals


class _Cursor:
    """Moving point in time that assigns each passed second to an account once."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def spend_until(self, time_s: float, category: str, account: Account, num_ranks: int = 0) -> None:
        """Assign the time up to `time_s` to a category of the account.

        A time in the past changes nothing. `num_ranks` defaults to the world size of the account.
        """
        if time_s > self.now_s:
            account.add(category, time_s - self.now_s, num_ranks or account.world_size)
            self.now_s = time_s


def _add_steps(span: Span, account: Account, cursor: _Cursor) -> None:
    """Add the time of an attempt's steps, from the first to the last."""
    account.steps_from_s = cursor.now_s
    spent = {"productive": span.productive_s - span.data_s, "data wait": span.data_s, "redone": span.redone_s}
    for act in ACTS:
        spent[_CATEGORY_OF_ACT[act]] = span.acts_s[act]
    for category, seconds in spent.items():
        account.add(category, seconds, account.world_size)
    account.add("idle", max(0.0, span.last_s - cursor.now_s - sum(spent.values())), account.world_size)
    cursor.now_s = max(cursor.now_s, span.last_s)
