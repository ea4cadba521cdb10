"""Decide what to do about hung, silent and missing workers, and about nodes that are about to go.

The module is pure: it receives the state of the run and the time as arguments, so that tests need no cluster.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from steadfast.config import RecoveryConfig
from steadfast.guards.failures import FailureKind
from steadfast.liveness.rank_times import RankTimes
from steadfast.liveness.verdicts import Costs, Guess, Price, patience_s
from steadfast.liveness.watchdog import Hang, Straggler, Watchdog, find_straggler
from steadfast.orchestration.heartbeat import Commands, Message, Silence
from steadfast.run import events
from steadfast.run.events import Event
from steadfast.world.report import ProgressReport
from steadfast.world.timeouts import Timeouts

_PATIENCE_S = 10.0  # time without enough workers, after which the run reports the shortage
_STRAGGLERS_S = 20.0  # time between two searches for a straggler
_STRAGGLER_AGAIN_S = 60.0  # least time between two events about stragglers
_STACKS_S = 0.5  # time for the stacks of a hung world to arrive


@dataclass(frozen=True)
class Record:
    """Decision to record an event."""

    event: Event


@dataclass(frozen=True)
class Dump:
    """Decision to request stacks from the workers of an attempt.

    The attempt 0 withdraws the request.
    """

    attempt: int


@dataclass(frozen=True)
class Abort:
    """Decision to end the current attempt at once, in the middle of a step."""


@dataclass(frozen=True)
class Lose:
    """Decision to declare a worker dead."""

    member: str
    cause: str
    kind: FailureKind


@dataclass(frozen=True)
class Release:
    """Decision to let workers leave the run.

    Workers of the current world leave at a step that all ranks agree on.
    """

    members: tuple[str, ...]


Decision = Record | Dump | Abort | Lose | Release


@dataclass(frozen=True)
class Situation:
    """State of the newest attempt at one check of its workers."""

    attempt: int
    world: tuple[str, ...]
    commands: Commands
    now_s: float
    stretch: float = 1.0  # factor for time limits, from the load of the coordinator's machine


@dataclass(frozen=True)
class _ReportedHang:
    """A reported hang, and the progress of its members at that time."""

    hang: Hang
    attempt: int
    places: dict[str, list[int]]
    at_s: float

    def lasts(self, attempt: int, reports: Mapping[str, ProgressReport]) -> bool:
        if attempt != self.attempt:
            return False
        return all(_place(reports[name]) == place for name, place in self.places.items() if name in reports)


class Supervisor:
    """Judge of the workers' progress and silence, of draining nodes and of shortages.

    The methods return decisions for the coordinator. They are generators, so that the coordinator carries out each
    decision before the next one is made: an exception does not undo the decisions before it.

    Args:
        stacks: folder that the event `Hang` names.
    """

    def __init__(self, recovery: RecoveryConfig, stacks: str) -> None:
        self.draining: set[str] = set()  # ids of nodes that are about to go
        self._stacks = stacks
        self._hang_limit_s = recovery.hang_limit_s
        self._timeouts = Timeouts(recovery.silence_s)
        self._shortage_s: float | None = None  # beginning of the last shortage that was reported
        self._costs = Costs()
        self._patient_until_s = 0.0  # time before which no worker is ended for a hang
        self._watchdog = Watchdog()
        self._reported: _ReportedHang | None = None  # the reported hang that still lasts
        self._silent: set[str] = set()  # workers whose silence was reported
        self._aborted = (0, 0.0)  # the last attempt that was aborted for a hang, and the hang's duration at that time
        self._hung: Counter[tuple[str, int]] = Counter()  # workers ended, by the phase and step of their hang
        self.progress: dict[str, ProgressReport] = {}  # newest report of each worker
        self._stretches: dict[str, float] = {}  # factor for time limits, from the lateness of each worker's heartbeats
        self._compared: dict[str, ProgressReport] = {}  # reports at the last search for stragglers
        self._compared_s = 0.0
        self._slow: Straggler | None = None  # straggler that the last search found
        self._told_straggler_s = -math.inf  # time of the last event about a straggler
        self._rank_times = RankTimes()

    def heard(self, name: str, message: Message) -> None:
        """Record a message from a worker's heartbeat connection."""
        self._silent.discard(name)
        if "progress" in message:
            self.progress[name] = ProgressReport(**message["progress"])
        if "stretch" in message:
            self._stretches[name] = float(message["stretch"])

    def observe(self, event: Event) -> None:
        """Update the estimate of costs with an event of the run."""
        self._costs.record(event)

    def discard_reports(self, now_s: float) -> None:
        """Discard the workers' reports, after the coordinator's process was stopped.

        The reports are old, and the workers get time to send new ones.
        """
        self.progress.clear()
        self._patient_until_s = now_s + self._timeouts.silence_s

    def patience(self, name: str, silence: Silence, world: Collection[str]) -> float:
        """Return the seconds that a worker in a world may be silent."""
        guess = Guess.SILENT if silence.answers else Guess.UNREACHABLE
        if silence.nobody_heard:
            price = self._costs.price(world, world)
        elif guess is Guess.UNREACHABLE:
            price = Price()  # the state on a dead machine is lost, and a longer wait does not save it
        else:
            price = self._costs.price((name,), world)
        stretch = max(silence.stretch, self._stretches.get(name, 1.0))
        limit_s = patience_s(guess, self._timeouts.silence_s, price, self._hang_limit_s, stretch)
        if guess is Guess.UNREACHABLE:
            # If all workers are silent, this machine may be the one that is cut off. The workers end after `lease_s`
            # too, so there is no reason to wait longer.
            limit_s = min(limit_s, self._timeouts.lease_s)
        return limit_s

    def report_silence(self, name: str, silence: Silence, limit_s: float, attempt: int) -> Iterator[Decision]:
        """Report a silent worker once, unless its limit has passed."""
        if name not in self._silent and silence.seconds < limit_s:
            self._silent.add(name)
            silent_s = round(silence.seconds, 1)
            rank = self.progress[name].rank if name in self.progress else None
            worker = f"worker {name}" if rank is None else f"rank {rank}"
            where = "its machine does not answer"
            if silence.answers:
                where = "its machine answers, its process does not"
            silent = events.Notice(
                attempt=attempt,
                event="silent",
                text=f"no heartbeat from {worker} for {silent_s} s: {where}; "
                f"the worker is declared dead after {limit_s:.0f} s",
                member=name,
                seconds=silent_s,
                answers=silence.answers,
                ends_s=round(limit_s, 1),
                rank=rank,
            )
            yield Record(silent)

    def check_drains(self, nodes: Mapping[str, float], members: Mapping[str, str]) -> Iterator[Decision]:
        """Let the workers of a node that is about to go leave the run.

        The coordinator admits no new worker of such a node.

        Args:
            nodes: each draining node, with the Unix time at which the node goes.
            members: each worker, with its node.
        """
        for node in nodes.keys() - self.draining:
            self.draining.add(node)
            names = tuple(name for name, its_node in members.items() if its_node == node)
            if names:
                yield Record(events.Preemption(node=node, deadline_s=nodes[node], members=names))
                yield Release(names)

    def check_shortage(self, since_s: float, waited_s: float, present: int, needed: int) -> Iterator[Decision]:
        """Report a shortage of workers once, when it has lasted for a while."""
        if waited_s > _PATIENCE_S and self._shortage_s != since_s:
            self._shortage_s = since_s
            yield Record(events.Waiting(workers=present, needed=needed, seconds=round(waited_s, 1)))

    def check_workers(self, now: Situation) -> Iterator[Decision]:
        """Judge the progress of the world's workers."""
        reports = self._reports(now)
        if self._reported is not None and not self._reported.lasts(now.attempt, reports):
            yield from self._end_hang(self._reported, now)
        if not reports:
            return
        self._costs.reached(min(report.step for report in reports.values()), now.now_s)
        if hang := self._watchdog.look(reports):
            yield from self._follow_hang(hang, reports, now)
        if now.now_s - self._compared_s > _STRAGGLERS_S:
            yield from self._look_for_straggler(reports, now.now_s)
        if times := self._rank_times.look(reports, now.now_s):
            yield Record(times)

    def _look_for_straggler(self, reports: dict[str, ProgressReport], now_s: float) -> Iterator[Decision]:
        found = find_straggler(self._compared, reports)
        # Other load on a machine may slow one worker for some seconds, so two searches have to find the same worker.
        lasts = found is not None and self._slow is not None and found.member == self._slow.member
        if found is not None and lasts and now_s - self._told_straggler_s >= _STRAGGLER_AGAIN_S:
            self._told_straggler_s = now_s
            yield Record(events.Straggler(**vars(found)))
        self._slow = found
        self._compared = reports
        self._compared_s = now_s

    def _reports(self, now: Situation) -> dict[str, ProgressReport]:
        """Return the newest progress report of each member of the world.

        The result is empty until all members have begun the attempt.
        """
        reports: dict[str, ProgressReport] = {}
        for name in now.world:
            progress = self.progress.get(name)
            if progress is None or progress.attempt != now.attempt:
                return {}
            reports[name] = progress
        return reports

    def _follow_hang(self, hang: Hang, reports: dict[str, ProgressReport], now: Situation) -> Iterator[Decision]:
        # An abort frees the members that wait in a collective, and ends no worker. So it is tried first, unless the
        # other members wait for the suspects.
        abort = hang.guess is not Guess.STUCK and now.commands.aborted != now.attempt
        stretch = now.stretch
        for name in reports:
            stretch = max(stretch, self._stretches.get(name, 1.0))
        price = self._costs.price(() if abort else hang.members, now.world)
        limit_s = patience_s(hang.guess, hang.usual_s, price, self._hang_limit_s, stretch)
        if self._reported is None:
            places = {name: _place(reports[name]) for name in hang.members}
            self._reported = _ReportedHang(hang, now.attempt, places, now.now_s)
            yield from self._report_hang(hang, now.attempt, limit_s, reports[hang.members[0]].reading)
            return
        if now.now_s - self._reported.at_s < _STACKS_S:
            return
        if now.commands.dump:
            yield Dump(0)  # so that the next hang of this attempt can request stacks again
        # Members that the abort has not freed get the whole time limit again.
        since_s = self._aborted[1] if self._aborted[0] == now.attempt else 0.0
        if hang.seconds - since_s < limit_s or now.now_s < self._patient_until_s:
            return
        if abort:
            self._aborted = (now.attempt, hang.seconds)
            yield Abort()
            return
        # If workers hang at the same place one after another, the cause is more likely the step's samples than the
        # workers. The message names this.
        place = (hang.phase, hang.step)
        again = ""
        if self._hung[place]:
            again = f", as {self._hung[place]} before it after step {hang.step}"
        for name in hang.members:
            self._hung[place] += 1
            what = f"hung in {hang.phase} for {hang.seconds:.1f} s {reports[name].reading}".rstrip()
            yield Lose(name, what + again, FailureKind.HANG)

    def _report_hang(self, hang: Hang, attempt: int, limit_s: float, reading: str) -> Iterator[Decision]:
        hung = events.Hang(
            attempt=attempt,
            ranks=hang.ranks,
            phase=hang.phase,
            step=hang.step,
            seconds=round(hang.seconds, 1),
            stacks=self._stacks,
            guess=hang.guess,
            reading=reading or None,
            ends_s=round(limit_s, 1),
        )
        yield Record(hung)
        yield Dump(attempt)

    def _end_hang(self, reported: _ReportedHang, now: Situation) -> Iterator[Decision]:
        self._reported = None
        yield Dump(0)
        if reported.attempt == now.attempt:  # otherwise the end of the attempt has been reported
            hang = reported.hang
            seconds = round(hang.seconds + now.now_s - reported.at_s, 1)
            over = events.HangOver(
                attempt=now.attempt, ranks=hang.ranks, phase=hang.phase, step=hang.step, seconds=seconds
            )
            yield Record(over)


def _place(report: ProgressReport) -> list[int]:
    """Return a worker's position without the entries that change during one phase."""
    return report.position[:3]
