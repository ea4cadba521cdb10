"""Drills in which workers are killed at a collective, on a communicator that completes with garbage when it is aborted.

Three processes train; one is killed, a newcomer takes its place, twice; the third time nobody does, and two finish.
Survivors learn of a death as on a cluster: somebody else sees it, and tells them to abort.
"""

import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from torch import Tensor, nn

from steadfast.checkpoint.state import sha256
from steadfast.config import Config
from steadfast.loop.worker_state import WorkerState
from steadfast.parallel import Parallel
from steadfast.parallel.dtensor import unsharded
from steadfast.run.directory import RunDirectory
from steadfast.worker import work
from steadfast.world.groups import PeerLost, is_peer_loss
from steadfast.world.runtime import World
from tests.support.checks import check_audit
from tests.support.command import is_alive
from tests.support.drill import Attempt, Drilled, DrillRuntime, begin_run, what_is_left
from tests.support.events import event_lines
from tests.support.gang import Gang, Member
from tests.support.like_nccl import CONNECTING, Death, behave_like_nccl

# Of plots of three deaths each. A test of them has 96 deaths more with DEATH_PLOTS=36 and -m slow than its first 12.
_NUM_QUICK, _NUM_PLOTS = 4, int(os.environ.get("DEATH_PLOTS", "4"))
SEEDS = [*range(_NUM_QUICK), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(_NUM_QUICK, _NUM_PLOTS))]
JOINING: tuple[list[int], ...] = ([0, 1, 2], [3], [4], [])  # in each world, beside the survivors of the one before
_LOOK_S = 0.005
# From a death until survivors are told. A rank that the machine has kept waiting at the gate of a whole step passes it
# meanwhile: where each survivor has the only copy of a part, a step that one of them has not passed is done again.
_TOLD_AFTER_S = 0.05
_MOMENTS = ("before it is launched", "while it runs", "when it is done")


class State(NamedTuple):
    """What a process holds after a step."""

    digest: str
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Plot:
    """Who is killed in which attempt, and where."""

    worlds: list[list[int]]
    deaths: dict[int, tuple[int, Death]]  # attempt -> (member, place)
    leave_after: dict[int, int] = field(default_factory=dict)  # attempt -> steps after which its last rank wishes to


def plot_replicas(seed: int, num_collectives: int, size: int = 2) -> Plot:
    """Return a plot for two replicas of `size`: two newcomers take victims' places, then a replica goes on alone."""
    draw = random.Random(seed)
    world = [*range(2 * size)]
    worlds, deaths = [], {}
    for attempt, newcomer in enumerate((2 * size, 2 * size + 1, None), 1):
        worlds.append(list(world))
        place = draw.randrange(2 * size)
        deaths[attempt] = (world[place], Death(draw.randint(1, num_collectives), draw.choice(_MOMENTS)))  # type: ignore[arg-type]
        if newcomer is None:
            world = world[size:] if place < size else world[:size]
        else:
            world[place] = newcomer
    return Plot([*worlds, world], deaths)


def plot(seed: int, num_collectives: int) -> Plot:
    """Return a plot with a death in each world but the last, within the first collectives of each."""
    draw = random.Random(seed)
    alive: list[int] = []
    worlds, deaths = [], {}
    for attempt, joining in enumerate(JOINING, 1):
        alive = [*alive, *joining]
        worlds.append(list(alive))
        if attempt < len(JOINING):
            victim = draw.choice(alive)
            deaths[attempt] = (victim, Death(draw.randint(1, num_collectives), draw.choice(_MOMENTS)))  # type: ignore[arg-type]
            alive.remove(victim)
    return Plot(worlds, deaths)


def with_a_death_in_connect(plotted: Plot, seed: int, num_communicators: int = 1) -> Plot:
    """Return the plot with one of its deaths moved to where communicators connect: a double death, if not the first."""
    moment = CONNECTING[seed % len(CONNECTING)]
    attempt = 1 + (1 + seed // len(CONNECTING)) % len(plotted.deaths)
    victim, _ = plotted.deaths[attempt]
    death = Death(random.Random(seed).randint(1, num_communicators), moment)  # type: ignore[arg-type]
    return Plot(plotted.worlds, {**plotted.deaths, attempt: (victim, death)}, plotted.leave_after)


class Held(NamedTuple):
    """What a survivor holds when a world begins."""

    attempt: int
    member: int
    step: int
    state: State


class Survived(NamedTuple):
    """How a run went on through deaths. `held` is of strategies in which a survivor has all of the state."""

    held: list[Held]
    left: Drilled


class Undisturbed(NamedTuple):
    """A run on three workers of which none dies."""

    states: dict[int, State]  # by step
    validation: dict[int, float]  # loss by step


def undisturbed(config: Config, patch: Callable[[], None] | None = None) -> Undisturbed:
    """Return what the run is on three workers, on the same communicator."""
    directory = begin_run(config)
    with Gang(3, patch) as gang:
        states = gang.run(_record_steps, config)[0]
    return Undisturbed(states, validation_losses(directory))


def validation_losses(directory: RunDirectory) -> dict[int, float]:
    """Return the loss of every validation, by step; the newest of a step that was done again."""
    events = event_lines(directory)
    return {event["step"]: event["loss"] for event in events if event["event"] == "validation"}


def _record_steps(member: Member, config: Config) -> dict[int, State]:
    behave_like_nccl(lambda: None)
    states: dict[int, State] = {}
    honest = WorkerState.advance_to

    def advance_to(self: WorkerState, step: int) -> None:
        honest(self, step)
        if is_compared(step):
            states[step] = _state(self)

    def is_compared(step: int) -> bool:
        # Of a sharded run only checkpoints are compared, and to unshard a state takes long.
        period = config.checkpoint.every.count
        return config.parallel.survivors_hold_all or step % period == 0 or step == config.run.steps

    WorkerState.advance_to = advance_to
    directory = RunDirectory.of(config)
    with closing(DrillRuntime(member, [Attempt(1, [0, 1, 2], None, None)], directory)) as runtime:
        work(config, runtime, directory)
    return states


def _state(worker: WorkerState) -> State:
    weights = {name: unsharded(tensor).clone() for name, tensor in worker.model.state_dict().items()}
    return State(sha256(worker.state(worker.model)), weights)


def survive(config: Config, plotted: Plot, mutation: Callable[[], None] | None = None) -> Survived:
    """Train through the deaths that are plotted.

    Raises:
        MemberFailed: a process raised, or one ended that was not to.
    """
    directory = begin_run(config)
    mortal = [victim for victim, _ in plotted.deaths.values()]
    with Gang(1 + max(map(max, plotted.worlds)), mutation) as gang:
        answers = gang.run(_survive, config, plotted, mortal=mortal)
    held = [each for answer in answers for each in answer or []]
    if mutation is None:
        check_audit(directory, config)
    return Survived(held, what_is_left(config, directory, []))


def _survive(member: Member, config: Config, plotted: Plot) -> list[Held]:
    directory = RunDirectory.of(config)
    runtime = MortalRuntime(member, plotted, directory)
    behave_like_nccl(runtime.death)
    held: list[Held] = []
    honest = WorkerState.prepare

    def prepare(self: WorkerState, world: World, parallel: Parallel) -> tuple[nn.Module, dict[str, Any]]:
        if parallel.survivors_hold_all and self.held.step is not None:
            held.append(Held(runtime.attempt, member.number, self.held.step, _state(self)))
        return honest(self, world, parallel)

    WorkerState.prepare = prepare
    with closing(runtime):
        work(config, runtime, directory)
    return held


def take_part(member: Member, config: Config, plotted: Plot) -> bool:
    """Train in the worlds of the plot that this process is in. Return True, as one that is killed does not."""
    directory = RunDirectory.of(config)
    with closing(MortalRuntime(member, plotted, directory)) as runtime:
        work(config, runtime, directory)
    return True


class MortalRuntime(DrillRuntime):
    """The schedule, where members of a world may die."""

    def __init__(self, member: Member, plotted: Plot, directory: RunDirectory) -> None:
        schedule = [
            Attempt(number, world, plotted.leave_after.get(number), None)
            for number, world in enumerate(plotted.worlds, 1)
        ]
        super().__init__(member, schedule, directory)
        self._deaths = plotted.deaths
        self._world: World | None = None
        self._broken = 0  # attempt in which somebody has died

    @property
    def attempt(self) -> int:
        return self._attempt.number

    def death(self) -> Death | None:
        """Return where this process dies in the world that is being formed."""
        victim, death = self._deaths.get(self._forming, (None, None))
        return death if victim == self._member.number else None

    def next_world(self) -> World | None:
        while True:
            self._world = None
            try:
                self._world = super().next_world()
            except PeerLost:
                continue  # those who are left form the next one
            # The death may have been seen while there was nothing to abort.
            if self._world is not None and self._broken == self.attempt:
                self._world.groups.abort()
            return self._world

    def failed(self, step: int, error: BaseException) -> bool:
        if not is_peer_loss(error):
            raise error
        return True

    def _form(self, attempt: Attempt, aborted: threading.Event | None = None) -> World:
        self._forming = attempt.number
        aborted = threading.Event()
        if attempt.number in self._deaths:
            self._member.store.set(f"pid/{attempt.number}/{self._member.number}", str(os.getpid()))
            threading.Thread(target=self._watch, args=(attempt.number, aborted), daemon=True).start()
        return super()._form(attempt, aborted)

    def _watch(self, attempt: int, aborted: threading.Event) -> None:
        key = f"pid/{attempt}/{self._deaths[attempt][0]}"
        while not self._member.store.check([key]):  # to wait for it would keep other threads from the store
            time.sleep(_LOOK_S)
        pid = int(self._member.store.get(key))
        while is_alive(pid):
            time.sleep(_LOOK_S)
        time.sleep(_TOLD_AFTER_S)
        self._broken = attempt
        # On a busy machine this process may be in the next world by now, which must not be aborted.
        world = self._world
        if world is None:
            aborted.set()
        elif world.attempt == attempt:
            world.groups.abort()
