"""Supervisor of a run, which finds faults that no call reports.

The supervisor polls for nodes that are about to go, for requests of `steadfast scale`, for too few workers and for hung
workers.
"""

import asyncio
import contextlib
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray

from steadfast.config import RecoveryConfig
from steadfast.guards.failures import FailureKind
from steadfast.liveness.flight_recorder import unpack
from steadfast.liveness.lateness import Lateness
from steadfast.liveness.rank_times import RankTimes
from steadfast.liveness.verdicts import Costs, Guess, Price, patience_s
from steadfast.liveness.watchdog import Hang, Watchdog, find_straggler
from steadfast.orchestration.heartbeat import Message, Silence
from steadfast.orchestration.internals import draining_nodes
from steadfast.orchestration.messages import Leave
from steadfast.run import events
from steadfast.run.directory import STACKS, RunDirectory
from steadfast.run.events import Event
from steadfast.run.owner import Ownership
from steadfast.world.progress import ProgressReport
from steadfast.world.timeouts import Timeouts

if TYPE_CHECKING:
    from steadfast.orchestration.coordinator import Coordinator

_INTERVAL_S = 0.25  # time between two checks
_PATIENCE_S = 10.0  # time without enough workers, after which the run reports the shortage
_STRAGGLERS_S = 60.0  # time between two searches for a straggler
_STACKS_S = 0.5  # time for the stacks of a hung world to arrive


@dataclass(frozen=True)
class _Told:
    """A reported hang, and the progress of its members at that time."""

    hang: Hang
    attempt: int
    places: dict[str, list[int]]
    at_s: float

    def lasts(self, attempt: int, world: dict[str, ProgressReport]) -> bool:
        if attempt != self.attempt:
            return False
        return all(_place(world[name]) == place for name, place in self.places.items() if name in world)


class Supervisor:
    """Watcher of nodes, scale requests and the workers' progress.

    The supervisor detects and records. It changes the world only through the coordinator, in whose process it runs.
    """

    def __init__(
        self, run: "Coordinator", directory: RunDirectory, ownership: Ownership, recovery: RecoveryConfig
    ) -> None:
        self.draining: set[str] = set()  # ids of nodes that are about to go
        self._run = run
        self._directory = directory
        self._ownership = ownership
        self._wait_s = recovery.wait_s  # time without enough workers, after which the run ends
        self._hang_limit_s = recovery.hang_limit_s
        self._timeouts = Timeouts(recovery.silence_s)
        self._told_since_s: float | None = None  # beginning of the last shortage that was reported
        self._costs = Costs()
        self._lateness = Lateness(_INTERVAL_S)
        self._patient_until_s = 0.0  # time before which no worker is ended for a hang
        self._watchdog = Watchdog()
        self._told: _Told | None = None  # the reported hang that still lasts
        self._silent: set[str] = set()  # workers whose silence was reported
        self._aborted = (0, 0.0)  # the last attempt that was aborted for a hang, and the hang's duration at that time
        self._hung: Counter[tuple[str, int]] = Counter()  # workers ended, by the phase and step of their hang
        self._progress: dict[str, ProgressReport] = {}  # newest report of each worker
        self._stretches: dict[str, float] = {}  # factor for time limits, from the lateness of each worker's heartbeats
        self._compared: dict[str, ProgressReport] = {}  # reports at the last search for stragglers
        self._compared_s = 0.0
        self._rank_times = RankTimes()
        self._unwritten: dict[str, bytes] = {}  # stacks and collectives to write, by file
        self._writing = ThreadPoolExecutor(1, "stacks")  # a thread, because storage may take any time

    def heard(self, name: str, message: Message) -> None:
        """Record a message from a worker's heartbeat connection."""
        self._silent.discard(name)
        if "progress" in message:
            self._progress[name] = ProgressReport(**message["progress"])
        if "stretch" in message:
            self._stretches[name] = float(message["stretch"])
        if "stacks" in message:
            file = f"{STACKS}/attempt-{self._ownership.attempt}-{name}.txt"
            self._write_later(file, message["stacks"].encode())
        if "collectives" in message:
            # torchfrtrace expects a folder for each attempt and file names that end with the rank.
            report = self._progress[name]
            file = f"{STACKS}/attempt-{report.attempt}-collectives/rank-{report.rank}"
            self._write_later(file, unpack(message["collectives"]))

    def close(self) -> None:
        """Accept no more files. Files that were accepted are still written."""
        self._writing.shutdown(wait=False)

    def observe(self, event: Event) -> None:
        """Update the estimate of costs with an event of the run."""
        self._costs.record(event)

    def price(self, ending: Collection[str]) -> Price:
        """Return the cost of ending these members of the world now."""
        return self._costs.price(ending, self._run.membership.world)

    def patience(self, name: str, silence: Silence) -> float:
        """Return the seconds that a worker in a world may be silent.

        The first call for a silent worker records the event `Silent`.
        """
        guess = Guess.SILENT if silence.answers else Guess.UNREACHABLE
        if silence.nobody_heard:
            price = self.price(self._run.membership.world)
        elif guess is Guess.UNREACHABLE:
            price = Price()  # the state on a dead machine is lost, and a longer wait does not save it
        else:
            price = self.price((name,))
        stretch = max(silence.stretch, self._stretches.get(name, 1.0))
        limit_s = patience_s(guess, self._timeouts.silence_s, price, self._hang_limit_s, stretch)
        if guess is Guess.UNREACHABLE:
            # If all workers are silent, this machine may be the one that is cut off. The workers end after `lease_s`
            # too, so there is no reason to wait longer.
            limit_s = min(limit_s, self._timeouts.lease_s)
        if name not in self._silent and silence.seconds < limit_s:
            self._silent.add(name)
            told_s = round(silence.seconds, 1)
            told = events.Silent(member=name, seconds=told_s, answers=silence.answers, ends_s=round(limit_s, 1))
            self._run.record(told.of_attempt(self._ownership.attempt))
        return limit_s

    async def watch(self) -> None:
        """Run all checks periodically until the run is over."""
        # Each check has a loop of its own, so that no check waits while another one waits for Ray or storage.
        await asyncio.gather(
            self._repeat(self._check_drains),
            self._repeat(self._check_scale),
            self._repeat(self._check_shortage),
            self._watch_workers(),
        )

    async def _repeat(self, look: Callable[[], Awaitable[None]]) -> None:
        while not self._run.over:
            if self._ownership.lost:
                self._run.give_up(self._ownership.lost)
            try:
                with contextlib.suppress(ray.exceptions.RayError, OSError):  # the next check tries again
                    await look()
            except Exception:  # one failed check must not end the loop
                traceback.print_exc()
            await asyncio.sleep(_INTERVAL_S)

    async def _check_drains(self) -> None:
        # Workers of a node that is about to go leave the world at an agreed step. The coordinator admits no new worker
        # of such a node.
        nodes = await asyncio.to_thread(draining_nodes)
        for node in nodes.keys() - self.draining:
            self.draining.add(node)
            names = tuple(member.name for member in self._run.members.values() if member.node == node)
            if names:
                self._run.record(events.Preemption(node=node, deadline_s=nodes[node], members=names))
                self._run.dismiss(self._run.membership.send_away(names), Leave.RELEASED)

    async def _check_scale(self) -> None:
        request = await asyncio.to_thread(self._directory.pop_scale_request)
        if request is None or self._run.heartbeats.commands.stop:
            return
        membership = self._run.membership
        self._run.record(events.Scale(before=(membership.smallest, membership.largest), after=request))
        self._run.dismiss(membership.rescale(*request), Leave.RELEASED)

    async def _check_shortage(self) -> None:
        since_s = self._run.short_since_s
        if since_s is None:
            return
        waited_s = time.monotonic() - since_s
        present = len(self._run.members)
        needed = self._run.membership.smallest
        if waited_s > _PATIENCE_S and self._told_since_s != since_s:
            self._told_since_s = since_s
            self._run.record(events.Waiting(workers=present, needed=needed, seconds=round(waited_s, 1)))
        if waited_s > self._wait_s:
            free = await asyncio.to_thread(ray.available_resources)
            self._run.give_up(
                f"waited {self._wait_s:g} s for workers: {present} of at least {needed} (scaling.num_workers) have "
                f"joined; {int(free.get('CPU', 0))} CPUs and {int(free.get('GPU', 0))} GPUs are free. "
                "Add nodes, and give the same command again"
            )

    async def _watch_workers(self) -> None:
        while not self._run.over:
            self._lateness.begin()
            await asyncio.sleep(_INTERVAL_S)
            _, gap = self._lateness.woke()
            if gap:
                # This process was stopped, so the reports are old. The workers get time to send new ones.
                self._progress.clear()
                self._patient_until_s = time.monotonic() + self._timeouts.silence_s
            try:
                self._check_progress()
            except Exception:  # one failed check must not end the loop
                traceback.print_exc()

    def _check_progress(self) -> None:
        world = self._world()
        attempt = self._ownership.attempt
        if self._told is not None and not self._told.lasts(attempt, world):
            self._tell_over(self._told, attempt)
        if not world:
            return
        now_s = time.monotonic()
        self._costs.reached(min(report.step for report in world.values()), now_s)
        if hang := self._watchdog.look(world):
            self._follow_hang(hang, attempt, world)
        if now_s - self._compared_s > _STRAGGLERS_S:
            if found := find_straggler(self._compared, world):
                self._run.record(events.Straggler(**vars(found)))
            self._compared = world
            self._compared_s = now_s
        if times := self._rank_times.look(world, now_s):
            self._run.record(times)

    def _world(self) -> dict[str, ProgressReport]:
        """Return the newest progress report of each member of the world.

        The result is empty until all members have begun the attempt.
        """
        world: dict[str, ProgressReport] = {}
        for name in self._run.membership.world:
            progress = self._progress.get(name)
            if progress is None or progress.attempt != self._ownership.attempt:
                return {}
            world[name] = progress
        return world

    def _follow_hang(self, hang: Hang, attempt: int, world: dict[str, ProgressReport]) -> None:
        now_s = time.monotonic()
        # An abort frees the members that wait in a collective, and ends no worker. So it is tried first, unless the
        # other members wait for the suspects.
        abort = hang.guess is not Guess.STUCK and self._run.heartbeats.commands.aborted != attempt
        stretch = self._lateness.stretch
        for name in world:
            stretch = max(stretch, self._stretches.get(name, 1.0))
        ending = () if abort else hang.members
        limit_s = patience_s(hang.guess, hang.usual_s, self.price(ending), self._hang_limit_s, stretch)
        if self._told is None:
            places = {name: _place(world[name]) for name in hang.members}
            self._told = _Told(hang, attempt, places, now_s)
            self._tell(hang, attempt, limit_s)
            return
        if now_s - self._told.at_s < _STACKS_S:
            return
        if self._run.heartbeats.commands.dump:
            self._run.heartbeats.command(dump=0)  # so that the next hang of this attempt can request stacks again
        # Members that the abort has not freed get the whole time limit again.
        since_s = self._aborted[1] if self._aborted[0] == attempt else 0.0
        if hang.seconds - since_s < limit_s or now_s < self._patient_until_s:
            return
        if abort:
            self._aborted = (attempt, hang.seconds)
            self._run.abort()
            return
        # If workers hang at the same place one after another, the cause is more likely the step's samples than the
        # workers. The message names this.
        place = (hang.phase, hang.step)
        again = ""
        if self._hung[place]:
            again = f", as {self._hung[place]} before it after step {hang.step}"
        for name in hang.members:
            self._hung[place] += 1
            self._run.lose(name, f"hung in {hang.phase} for {hang.seconds:.1f} s{again}", FailureKind.HANG)

    def _tell(self, hang: Hang, attempt: int, limit_s: float) -> None:
        told = events.Hang(
            attempt=attempt,
            ranks=hang.ranks,
            phase=hang.phase,
            step=hang.step,
            seconds=round(hang.seconds, 1),
            stacks=self._directory / STACKS,
            guess=hang.guess,
            ends_s=round(limit_s, 1),
        )
        self._run.record(told)
        self._run.heartbeats.command(dump=attempt)

    def _tell_over(self, told: _Told, attempt: int) -> None:
        self._told = None
        self._run.heartbeats.command(dump=0)
        if told.attempt == attempt:  # otherwise the end of the attempt has been reported
            seconds = round(told.hang.seconds + time.monotonic() - told.at_s, 1)
            hang = told.hang
            over = events.HangOver(attempt=attempt, ranks=hang.ranks, phase=hang.phase, step=hang.step, seconds=seconds)
            self._run.record(over)

    def _write_later(self, file: str, contents: bytes) -> None:
        # Newer contents replace those that wait to be written, so that slow storage does not fill the memory.
        self._unwritten[file] = contents
        self._writing.submit(self._write_one)

    def _write_one(self) -> None:
        with contextlib.suppress(OSError, KeyError):
            file, contents = self._unwritten.popitem()
            self._directory.store.commit(file, contents)


def _place(report: ProgressReport) -> list[int]:
    """Return a worker's position without the entries that change during one phase."""
    return report.position[:3]
