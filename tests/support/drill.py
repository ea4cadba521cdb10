"""`drill(config, worlds=[3, 2, 3], leave_after=[4, 4])`: the whole loop in real processes, world after world."""

import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import zip_longest
from typing import Any, NamedTuple

from torch import Tensor

from steadfast.checkpoint.catalog import Catalog, path_of
from steadfast.checkpoint.weights import read_whole
from steadfast.config import Config
from steadfast.guards.corruption import NO_RANK, Corrupted
from steadfast.guards.numerics import BadStep
from steadfast.guards.out_of_memory import OutOfMemory
from steadfast.run.directory import RunDirectory
from steadfast.run.events import Event, ForwardsShrunk, RunStarted
from steadfast.worker import work
from steadfast.world.groups import WorldRank, is_peer_loss
from steadfast.world.progress import Progress
from steadfast.world.runtime import Signals, WorkerProcess, World, form_world
from steadfast.world.timeouts import Timeouts
from tests.support.checks import check_audit
from tests.support.events import event_lines
from tests.support.gang import Gang, Member
from tests.support.history import History, read_ledger
from tests.support.reference import CPU


class _Patient(Timeouts):
    """Limits for processes of which those outside of a world wait for the next one, all the time that it takes."""

    @property
    def connect(self) -> timedelta:
        # By then all are there. Gloo waits five times as long for one that has died at this moment.
        return timedelta(seconds=10)

    def first_collectives(self, size: int) -> timedelta:
        # By then all are there, too, and the others wait so long for one that has died at this moment.
        return timedelta(seconds=6)


PATIENT = _Patient(silence_s=40.0)
Members = int | Sequence[int]  # of a world: the processes 0 to n - 1, or these, in the order of their ranks


class Attempt(NamedTuple):
    """One world of the schedule. leave_after, stop_after: steps after which its last rank wishes to."""

    number: int
    members: Sequence[int]
    leave_after: int | None
    stop_after: int | None


class Seat(NamedTuple):
    attempt: int
    rank: int
    pid: int


@dataclass(frozen=True)
class Drilled:
    """What a drill leaves behind. Weights and optimizer state are whole, read from the last checkpoint.

    seats: who sat where, in the order of attempts and ranks.
    """

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    history: History
    events: list[dict[str, Any]]
    summary: dict[str, Any]
    seats: list[Seat]

    def told(self, name: str, field: str) -> list[Any]:
        """`field` of every event of this name, oldest first."""
        return [event[field] for event in self.events if event["event"] == name]

    def pids(self) -> list[list[int]]:
        """By attempt, in the order of ranks."""
        attempts = sorted({seat.attempt for seat in self.seats})
        return [[seat.pid for seat in self.seats if seat.attempt == attempt] for attempt in attempts]


def drill(
    config: Config,
    worlds: Sequence[Members],
    leave_after: Sequence[int] = (),
    stop_after: int | None = None,
    patch: Callable[[], None] | None = None,
    audited: bool = True,
) -> Drilled:
    """Trains in each world in turn, in processes that live through all of them, and reads what they left.

    Args:
        leave_after: for each world but the last, the steps after which one of its workers wishes to leave. The wish is
            agreed on one step later.
        stop_after: the same for the last world and the wish to stop; None lets it finish.
        patch: called in every process before anything else, to break something on purpose.
        audited: whether the audit must pass; not where samples are broken on purpose.

    Raises:
        MemberFailed: a process raised.
        CounterExample: the audit did not pass.
    """
    directory = begin_run(config)
    earlier = max((line["attempt"] for line in read_ledger(directory.store).lines), default=0)
    schedule = [
        Attempt(earlier + index, _members(world), leave, stop_after if index == len(worlds) else None)
        for index, (world, leave) in enumerate(zip_longest(worlds, leave_after), 1)
    ]
    with Gang(1 + max(number for attempt in schedule for number in attempt.members), patch) as gang:
        seats = gang.run(_take_part, config, schedule)
    if audited:
        check_audit(directory, config)
    return what_is_left(config, directory, sorted(seat for each in seats for seat in each))


def begin_run(config: Config) -> RunDirectory:
    """Return the run's directory, in which the start of the run is recorded."""
    directory = RunDirectory.of(config)
    directory.check_writable()
    directory.record(RunStarted(launcher="drill"))
    return directory


def _members(world: Members) -> Sequence[int]:
    return range(world) if isinstance(world, int) else world


def _take_part(member: Member, config: Config, schedule: list[Attempt]) -> list[Seat]:
    directory = RunDirectory.of(config)
    with closing(DrillRuntime(member, schedule, directory)) as runtime:
        work(config, runtime, directory)
    return runtime.seats


def what_is_left(config: Config, directory: RunDirectory, seats: list[Seat]) -> Drilled:
    summary = directory.summary()
    assert summary is not None
    catalog, last = Catalog(directory.store), summary["step"]
    assert summary["last_checkpoint"].partition("?")[0].endswith(path_of(last))
    return Drilled(
        weights=read_whole(catalog, last),
        optimizer=read_whole(catalog, last, "optimizer"),
        history=read_ledger(directory.store),
        events=event_lines(directory),
        summary=summary,
        seats=seats,
    )


class DrillRuntime:
    """The schedule, as one process sees it. A world that it is not in, it does not wait for."""

    device = CPU

    def __init__(self, member: Member, schedule: list[Attempt], directory: RunDirectory) -> None:
        self._member, self._directory, self._events = member, directory, directory.open_events()
        self.progress = Progress()
        self._coming = iter([attempt for attempt in schedule if member.number in attempt.members])
        self.seats: list[Seat] = []

    def next_world(self) -> World | None:
        attempt = next(self._coming, None)
        if attempt is None:
            return None
        world = self._form(attempt)
        # Once all are here who may have more to say.
        world = replace(world, amendments=self._directory.amendments())
        self.seats.append(Seat(world.attempt, world.rank, os.getpid()))
        self._attempt, self._wishes, self._num_steps = attempt, world.rank == world.size - 1, 0
        return world

    def _form(self, attempt: Attempt, aborted: threading.Event | None = None) -> World:
        rank = attempt.members.index(self._member.number)
        own = WorldRank(rank, len(attempt.members), attempt.number)
        # A test may give each process a host of its own.
        process = WorkerProcess(self.device, PATIENT, self.progress, socket.gethostname())
        return form_world(self._member.store, own, process, aborted=aborted)

    def signals(self) -> Signals:
        """Asked once a step."""
        self._num_steps += 1
        return Signals(stop=self._wants(self._attempt.stop_after), leave=self._wants(self._attempt.leave_after))

    def publish(self, event: Event) -> None:
        self._events.write(event)

    def close(self) -> None:
        self._events.close()

    def failed(self, step: int, error: BaseException) -> bool:
        """A bad step, or one computed wrongly, or want of memory ends an attempt as a wish to leave does: the schedule
        goes on."""
        if isinstance(error, Corrupted) and error.rank != NO_RANK:  # by the odd rank too, which has given up its state
            assert error.cause.startswith(f"step {step + 1}:"), f"reported after step {step}: {error.cause}"
        if isinstance(error, OutOfMemory):
            self.publish(ForwardsShrunk(step=step + 1, forward_size=error.forward_size, error=error.error))
        elif not (
            isinstance(error, BadStep | Corrupted)
            or (is_peer_loss(error) and self._directory.amendments().forward_size)
        ):
            raise error
        self._events.close()  # which step is to be left out is read there
        self._events = self._directory.open_events()
        return True

    def _wants(self, after: int | None) -> bool:
        return self._wishes and after is not None and self._num_steps >= after
