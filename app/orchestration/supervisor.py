"""The supervisor of a run: it looks again and again for what nobody tells the coordinator."""

import asyncio
import contextlib
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import ray

from app.faults.watchdog import Hang, Watchdog, find_straggler
from app.orchestration.heartbeat import Message
from app.orchestration.internals import draining_nodes
from app.orchestration.messages import Leave
from app.run import events
from app.run.directory import RunDirectory
from app.run.owner import Ownership
from app.world.progress import ProgressReport

if TYPE_CHECKING:
    from app.orchestration.coordinator import Coordinator

_INTERVAL_S = 0.25  # between two looks
_PATIENCE_S = 10.0  # how long a run is short of workers before it says so
_STRAGGLERS_S = 60.0  # how often the rank that makes others wait is named
_STACKS_S = 0.5  # for the stacks of a hung world to arrive


class Supervisor:
    """Watch nodes, requests for another scale and the workers' progress, and act through the coordinator."""

    def __init__(self, run: "Coordinator", directory: RunDirectory, ownership: Ownership, wait_s: float) -> None:
        self.draining: set[str] = set()  # nodes that are about to go
        self._run = run
        self._directory = directory
        self._ownership = ownership
        self._wait_s = wait_s  # how long a run that is short of workers waits for more
        self._told_since_s: float | None = None  # the shortage that has been told of
        self._watchdog = Watchdog()
        self._progress: dict[str, ProgressReport] = {}  # the newest of each worker
        self._compared: dict[str, ProgressReport] = {}  # at the last look for stragglers
        self._compared_s = 0.0

    def heard(self, name: str, message: Message) -> None:
        """Take note of a message that came with a worker's heartbeats."""
        if "progress" in message:
            self._progress[name] = ProgressReport(**message["progress"])
        if "stacks" in message:
            file = f"stacks/attempt-{self._ownership.attempt}-{name}.txt"
            # In a thread, because heartbeats must not wait for storage. Whether it takes them is nobody's concern.
            commit = self._directory.store.commit
            asyncio.get_running_loop().run_in_executor(None, commit, file, message["stacks"].encode())

    async def watch(self) -> None:
        """Look again and again until the run is over."""
        while not self._run.over:
            with contextlib.suppress(ray.exceptions.RayError, OSError):  # what cannot be read now is read next time
                # In threads, because the event loop must not wait for Ray or for storage.
                self._check_drains(await asyncio.to_thread(draining_nodes))
                self._check_scale(await asyncio.to_thread(self._directory.pop_scale_request))
                self._check_shortage()
                await self._check_progress()
            await asyncio.sleep(_INTERVAL_S)

    def _check_drains(self, nodes: dict[str, float]) -> None:
        # Once a node is going, nobody is let in from it any more, and whoever is in the world leaves at an agreed step.
        for node in nodes.keys() - self.draining:
            self.draining.add(node)
            names = tuple(member.name for member in self._run.members.values() if member.node == node)
            if names:
                self._run.record(events.Preemption(node=node, deadline_s=nodes[node], members=names))
                self._run.dismiss(self._run.membership.send_away(names), Leave.RELEASED)

    def _check_scale(self, request: tuple[int, int] | None) -> None:
        if request is None or self._run.heartbeats.commands.stop:
            return
        membership = self._run.membership
        self._run.record(events.Scale(before=(membership.smallest, membership.largest), after=request))
        self._run.dismiss(membership.rescale(*request), Leave.RELEASED)

    def _check_shortage(self) -> None:
        since_s = self._run.short_since_s
        if since_s is None:
            return
        waited_s = time.monotonic() - since_s
        present = len(self._run.members)
        needed = self._run.membership.smallest
        if waited_s > _PATIENCE_S and self._told_since_s != since_s:
            self._told_since_s = since_s
            self._run.record(events.Waiting(workers=present, needed=needed))
        if waited_s > self._wait_s:
            free = ray.available_resources()
            self._run.give_up(
                f"waited {self._wait_s:g} s for workers: {present} of at least {needed} (scaling.num_workers) are "
                f"there; {int(free.get('CPU', 0))} CPUs and {int(free.get('GPU', 0))} GPUs are free. "
                "Add nodes, and give the same command again"
            )

    async def _check_progress(self) -> None:
        world: dict[str, ProgressReport] = {}
        for name in self._run.membership.world:
            progress = self._progress.get(name)
            if progress is None or progress.attempt != self._ownership.attempt:
                return  # not all have begun the attempt
            world[name] = progress
        if not world:
            return
        if hang := self._watchdog.look(world):
            await self._end_hang(hang)
        if time.monotonic() - self._compared_s > _STRAGGLERS_S:
            if found := find_straggler(self._compared, world):
                self._run.record(events.Straggler(**asdict(found)))
            self._compared = world
            self._compared_s = time.monotonic()

    async def _end_hang(self, hang: Hang) -> None:
        attempt = self._ownership.attempt
        told = asdict(replace(hang, seconds=round(hang.seconds, 1)))
        self._run.record(events.Hang(attempt=attempt, stacks=self._directory / "stacks", **told))
        self._run.heartbeats.command(dump=attempt)
        await asyncio.sleep(_STACKS_S)
        # If all are stuck, nobody can go on without them, and an abort may free them. If it has not, the watchdog finds
        # them again, and they are killed.
        if not hang.waiting and self._run.heartbeats.commands.aborted != attempt:
            self._run.abort()
            return
        for name in hang.members:
            self._run.lose(name, f"hung in {hang.phase} for {hang.seconds:.1f} s", "hang")
