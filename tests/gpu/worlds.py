"""Members that train with the app in world after world, which the drill's process dictates, and may die meanwhile.

What the coordinator does under Ray is done here by a store: it says which world comes next, who is to leave, and which
attempt is aborted. So a drill needs no Ray, and a member is the app's own `work`.
"""

import gc
import json
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from steadfast.config import Config, parse_config
from steadfast.guards.numerics import BadStep
from steadfast.run.directory import RunDirectory
from steadfast.run.events import Event, Restore, RunStarted
from steadfast.worker import work
from steadfast.world.groups import PeerLost, WorldRank, is_peer_loss
from steadfast.world.progress import Limits, Progress
from steadfast.world.runtime import Signals, WorkerProcess, World, form_world
from tests.gpu import subjects
from tests.gpu.ranks import SURVIVABLE, Rank, Ranks
from tests.gpu.scene import Scene
from tests.support.events import event_lines

_BEAT_S = 0.2
_OVER = "over"
_GROWTH = 1.1  # of what is in use once it has settled
_HEAP_GROWTH = 1.2  # of the process's memory, of which the allocator keeps more or less
_RUN = """
run:        {name: run}
batch:      {global_size: 24, microbatch_size: 4}
model:      {target: "tests.gpu.subjects:Net"}
data:       {target: "tests.gpu.subjects:Points", validation_fraction: 0.0, num_workers: 0}
task:       {kind: classification}
optimizer:  {target: "tests.gpu.subjects:WatchedAdamW", lr: 1.0e-3}
precision:  {kind: fp32}
schedule:   {kind: constant}
checkpoint: {every: 1000000 steps}
validation: {every: null}
logging:    {every_steps: 1}
trackers:   []
"""


class Company:
    """The members of a drill, and the worlds that they are told to form."""

    def __init__(self, scene: Scene, overrides: list[str], name: str, beats: bool = False, stance: str = "") -> None:
        """Start no member yet.

        Args:
            beats: every member reports its progress, as heartbeats do.
            stance: of torch's compiler, from the second attempt on.
        """
        overrides = [f"run.storage={scene.folder / name}", *overrides]
        args = {"overrides": overrides, "beats": beats, "stance": stance}
        self.ranks = Ranks(scene, "tests.gpu.worlds:be_a_member", 0, args, f"{name}-members")
        self.directory = RunDirectory.of(configuration(overrides))
        self.directory.check_writable()
        self.directory.record(RunStarted(launcher="drill"))
        self._scene = scene
        self._attempt = 0

    def start(self, *members: int, **environment: str) -> None:
        """Start members, each of which outlives an abort, with more variables."""
        for member in members:
            self.ranks.start(member, **SURVIVABLE, **environment)

    def train(self, size: int, bound_s: float) -> None:
        """Have so many members train in one world until all have ended, and check that they end well."""
        with self.ranks as ranks:
            self.start(*range(size))
            self.form(list(range(size)))
            self.end()
            ranks.check_ended(ranks.wait(bound_s), what=f"{self.ranks.folder.name}: member")

    def form(self, members: list[int]) -> None:
        """Tell these members to form the next world, in the order of their ranks."""
        self._attempt += 1
        self.ranks.store.set(f"world/{self._attempt}", json.dumps(members))

    def abort(self) -> None:
        """Have every member abort the present world, as the coordinator orders it when one is lost."""
        self.ranks.store.set(f"abort/{self._attempt}", "")

    def resize(self) -> None:
        """Have the members leave the present world at a step that they agree on."""
        self.ranks.store.set(f"leave/{self._attempt}", "")

    def end(self) -> None:
        """Tell those who wait for a world that none follows."""
        self.ranks.store.set(f"world/{self._attempt + 1}", _OVER)

    def wait_for_step(self, step: int, bound_s: float) -> bool:
        """Wait until the ledger has the line of a step in the present attempt. Return False if that takes longer."""
        until_s = time.monotonic() + bound_s
        while time.monotonic() < until_s and self.ranks.living():
            line = self.directory.last_step_line()
            if line and line["attempt"] == self._attempt and line["step"] >= step:
                return True
            time.sleep(0.02)
        return False

    def train_on(self, when: str, bound_s: float) -> None:
        """Wait until the present world has taken steps. Raises RuntimeError if that takes longer."""
        # Steps do not begin anew: the world must get beyond what was done before it.
        before = self.directory.last_step()
        if not self.wait_for_step(before + 3, bound_s):
            raise RuntimeError(f"{when}: no steps within {bound_s:g} s: {self.ranks.last_words(0)}")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the run's events of a name, oldest first."""
        return [line for line in event_lines(self.directory) if line["event"] == name]

    def updates(self, member: int, attempt: int) -> list[dict[str, Any]]:
        """Return the digests that a member took of its weights around each update of an attempt."""
        lines = [line for line in self.ranks.notes(member) if line.get("kind") == "updates"]
        return [update for line in lines if line["attempt"] == attempt for update in line["updates"]]

    def memory(self) -> list[dict[str, Any]]:
        """Return what member 0 has noted of its memory: before its first world, after each, and after restores."""
        return [note for note in self.ranks.notes(0) if note["kind"] == "memory"]

    def check_flat(self, num_settling: int) -> None:
        """Check that nothing which member 0 holds grows after so many worlds."""
        for name in ("tensor_bytes", "allocated_bytes", "reserved_bytes", "rss_bytes", "num_threads", "num_fds"):
            values = [note[name] for note in self.memory() if note["moment"] == "trained" and name in note]
            if values:
                self._scene.figure(**{name: f"{values[0]} .. {values[-1]}"})
            settled = values[1 + num_settling :]
            if len(settled) >= 2:
                first, last = median(settled[:3]), median(settled[-3:])
                growth = _HEAP_GROWTH if name == "rss_bytes" else _GROWTH
                claim = f"{name} grows after world {num_settling}: {first} -> {last}"
                self._scene.check(last <= max(growth * first, first + 2), claim)


def configuration(overrides: list[str]) -> Config:
    """Return the configuration of a company's run."""
    return parse_config(_RUN, "drill", overrides)


def be_a_member(rank: Rank) -> None:
    """Train in every world that this member is a part of."""
    config = configuration(rank.args["overrides"])
    directory = RunDirectory.of(config)
    runtime = MemberRuntime(rank, directory)
    try:
        outcome = work(config, runtime, directory)
        runtime.note_updates()
        runtime.note_memory()
        rank.note(kind="end", outcome=outcome and outcome.kind)
    except BaseException:
        traceback.print_exc()
        _exit(1)
    _exit(0)


def _exit(code: int) -> None:
    # Threads wait on the store until the process ends, and a device that has failed may keep an orderly end waiting.
    sys.stderr.flush()
    os._exit(code)


class MemberRuntime:
    """A `Runtime` whose worlds, requests and aborts come from a store."""

    def __init__(self, rank: Rank, directory: RunDirectory) -> None:
        self.device = rank.device
        self.progress = Progress(Limits())
        self._rank, self._directory = rank, directory
        self._attempt = 0
        self._events = directory.open_events()
        if rank.args["beats"]:
            threading.Thread(target=self._beat, daemon=True).start()

    def next_world(self) -> World | None:
        self.note_memory()
        self.note_updates()
        while True:
            self._attempt += 1
            self._rank.store.wait([f"world/{self._attempt}"])
            told = self._rank.store.get(f"world/{self._attempt}").decode()
            if told == _OVER:
                return None
            members: list[int] = json.loads(told)
            if self._rank.number not in members:
                continue
            try:
                return self._form(members)
            except PeerLost as error:
                self.failed(0, error)

    def _form(self, members: list[int]) -> World:
        rank, size = members.index(self._rank.number), len(members)
        began_s = time.monotonic()
        store = self._rank.store
        process = WorkerProcess(self.device, progress=self.progress)
        world = form_world(store, WorldRank(rank, size, self._attempt), process)
        world = replace(world, amendments=self._directory.amendments())
        if self._attempt > 1 and (stance := self._rank.args["stance"]):
            torch.compiler.set_stance(stance)
        self._rank.note(kind="formed", attempt=self._attempt, seconds=time.monotonic() - began_s)
        subjects.attempt = self._attempt
        threading.Thread(target=self._abort_when_told, args=(world, self._attempt), daemon=True).start()
        return world

    def _abort_when_told(self, world: World, attempt: int) -> None:
        store = self._rank.another_store()
        while not store.check([f"abort/{attempt}"]):
            if self._attempt != attempt:
                return
            time.sleep(0.005)
        began_s = time.monotonic()
        world.groups.abort()
        self._rank.note(kind="aborted", attempt=attempt, seconds=time.monotonic() - began_s)

    def signals(self) -> Signals:
        return Signals(leave=self._rank.store.check([f"leave/{self._attempt}"]))

    def publish(self, event: Event) -> None:
        self._events.write(event)
        if isinstance(event, Restore):  # by the leader, before its first step
            self.note_memory("restored")

    def failed(self, step: int, error: BaseException) -> bool:
        """Note why an attempt broke. A lost peer is what most drills are about; anything else ends the member."""
        text = f"{type(error).__name__}: {error}"
        self._rank.note(kind="failed", attempt=self._attempt, step=step, error=text[:500], peer=is_peer_loss(error))
        if not is_peer_loss(error) and not isinstance(error, BadStep):
            raise error
        return True

    def note_updates(self) -> None:
        """Write down the digests of the attempt's updates. Reading them waits for the device."""
        if subjects.updates:
            lines = [{"before": before.item(), "after": after.item()} for before, after in subjects.updates]
            subjects.updates.clear()
            self._rank.note(kind="updates", attempt=subjects.attempt, updates=lines)

    def note_memory(self, moment: str = "trained") -> None:
        """Write down what this member holds, and the peak of device memory since the last time."""
        gc.collect()  # cycles that nobody refers to are no growth
        figures: dict[str, Any] = {"num_threads": threading.active_count(), "num_fds": len(os.listdir("/proc/self/fd"))}
        figures["rss_bytes"] = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        figures["tensor_bytes"] = _tensor_bytes()
        if self.device.type == "cuda":
            figures["peak_bytes"] = torch.cuda.max_memory_allocated()
            figures["allocated_bytes"] = torch.cuda.memory_allocated()
            figures["reserved_bytes"] = torch.cuda.memory_reserved()
            torch.cuda.reset_peak_memory_stats()
        self._rank.note(kind="memory", after_attempt=self._attempt, moment=moment, **figures)

    def _beat(self) -> None:
        """Report progress, as heartbeats do."""
        while True:
            temporary = self._rank.folder / f".beat-{self._rank.number}"
            temporary.write_text(json.dumps(asdict(self.progress.report())))
            temporary.replace(self._rank.folder / f"beat-{self._rank.number}.json")
            time.sleep(_BEAT_S)


def _tensor_bytes() -> int:
    """Return the bytes of all tensors of this process that Python knows of."""
    storages: dict[int, int] = {}
    for each in gc.get_objects():
        # Subclasses have no storage of their own: those that a compiler traces with, and shards, which wrap a tensor.
        if type(each) in (torch.Tensor, torch.nn.Parameter) and not each.is_meta:
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(storages.values())
