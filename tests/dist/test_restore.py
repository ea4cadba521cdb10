"""What a worker holds is its own until it is overwritten: a member that is lost in between takes nothing along."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from steadfast.checkpoint.catalog import Catalog
from steadfast.checkpoint.durable import Checkpoints, Fingerprints
from steadfast.checkpoint.node_memory import ProcessMemory
from steadfast.checkpoint.restore import restore
from steadfast.checkpoint.snapshots import Snapshots
from steadfast.checkpoint.state import HeldState
from steadfast.checkpoint.writer import Writer
from steadfast.config import DdpConfig
from steadfast.parallel.precision import Precision
from steadfast.parallel.replicated import ReplicatedParallelism
from steadfast.storage import LocalStore
from steadfast.world.groups import PeerLost, WorldRank
from steadfast.world.runtime import Outcome, WorkerProcess, form_world
from tests.support.gang import Gang, Member
from tests.support.reference import CPU

NO_STATE = -1


class Replica:
    def __init__(self, held: int, number: int) -> None:
        self.number = number
        self.held = HeldState()
        if held == NO_STATE:
            self.held.begin_overwriting()
        else:
            self.held.complete(held)
        self.weights = torch.full((4,), float(held))

    def load_initial(self) -> None:
        """As if each had a file of its own."""
        self.weights.fill_(0.5 + self.number)

    @property
    def step(self) -> int:
        return NO_STATE if self.held.step is None else self.held.step


def meet(member: Member, attempt: int, held: list[int], leaves: int | None, path: str) -> tuple[int, float, str]:
    """(held, weight, source or what was raised) after a restore by members that hold these steps; one may leave."""
    world = form_world(member.store, WorldRank(member.number, len(held), attempt), WorkerProcess(CPU))
    member.store.set(_formed(attempt, member.number), "")
    replica = Replica(held[member.number], member.number)
    try:
        if member.number == leaves:
            member.store.wait([_formed(attempt, number) for number in range(len(held))])
            world.groups.abort()
            return replica.step, float(replica.weights[0]), "left"
        state = {"model": {"w": replica.weights}}
        parallel = ReplicatedParallelism(DdpConfig(), world, Precision(CPU))
        checkpoints = Checkpoints(Catalog(LocalStore(Path(path))), world, parallel, Writer(), Fingerprints(""))
        snapshots = Snapshots(world, None, parallel, state)
        restored = restore(state, replica.held, replica.load_initial, checkpoints, snapshots)
        return replica.step, float(replica.weights[0]), restored.source
    except (RuntimeError, PeerLost):
        return replica.step, float(replica.weights[0]), "lost"
    finally:
        world.groups.destroy()


class Lasting(ProcessMemory):
    """Memory that a worker which has lost its state finds again, as the machine's is."""

    lasting = True


class Changing(Lasting):
    """Memory whose copies change after they were made."""

    def verify(self, number: int) -> None:
        raise OSError("changed")


def come_back(
    member: Member,
    attempt: int,
    path: str,
    copied: int,
    committed: int,
    known: bool,
    changing: bool = False,
    other: str = "",
) -> tuple[int, str, float]:
    """(step, source, age of the checkpoint) that workers without a state find: of a copy, and a checkpoint.

    Args:
        copied, committed: their steps; 0 for no checkpoint.
        known: they are those that have written the checkpoint.
        changing: the copies have changed.
        other: what is not as it was when the copies were made: "data", "model" or "hooks".
    """
    memory, writer = Changing() if changing else Lasting(), Writer()
    replica = Replica(NO_STATE, member.number)
    state = {"model": {"w": replica.weights}}
    catalog = Catalog(LocalStore(Path(path)))
    for number in range(2):
        world = form_world(member.store, WorldRank(member.number, 3, attempt + number), WorkerProcess(CPU))
        try:
            parallel = ReplicatedParallelism(DdpConfig(), world, Precision(CPU))
            known_writer = writer if known else Writer()
            checkpoints = Checkpoints(catalog, world, parallel, known_writer, Fingerprints(""))
            if number == 1 and other == "model":
                state = {"model": {"w": replica.weights, "b": torch.zeros(1)}}
            if number == 1 and other == "hooks":
                state["hooks"] = {"h": torch.zeros(1)}
            data = "others" if number == 1 and other == "data" else "data"
            snapshots = Snapshots(world, memory, parallel, state, data)
            if number == 1:
                restored = restore(state, replica.held, replica.load_initial, checkpoints, snapshots)
                assert restored.source == "start" or float(replica.weights[0]) == restored.step
                assert snapshots.damaged == ({copied: f"on {world.node}: changed"} if changing else {})
                return restored.step, restored.source, restored.age_s
            if committed:
                replica.weights.fill_(committed)
                checkpoints.save(committed, state, {}, Outcome("finished", committed))
            replica.weights.fill_(copied)
            snapshots.take(copied, state)
            replica.weights.fill_(-1)
        finally:
            world.groups.destroy()
    raise AssertionError


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("first", "copied", "committed", "expected"),
    [(10, 30, 20, (30, "snapshot")), (20, 20, 30, (30, "checkpoint")), (30, 30, 30, (30, "snapshot"))],
)
def test_the_newer_of_copy_and_checkpoint_is_restored(
    gang: Gang, tmp_path: Path, known: bool, first: int, copied: int, committed: int, expected: tuple[int, str]
) -> None:
    found = gang.run(come_back, first + 100 * known, str(tmp_path), copied, committed, known)
    assert [each[:2] for each in found] == [expected] * 3


def test_a_copy_that_has_changed_is_no_candidate(gang: Gang, tmp_path: Path) -> None:
    found = gang.run(come_back, 250, str(tmp_path), 30, 20, True, True)
    assert [each[:2] for each in found] == [(20, "checkpoint")] * 3


@pytest.mark.parametrize(("first", "other", "step"), [(300, "data", 0), (310, "model", 0), (320, "hooks", 30)])
def test_a_copy_of_another_model_or_of_other_data_is_no_candidate(
    gang: Gang, tmp_path: Path, first: int, other: str, step: int
) -> None:
    found = gang.run(come_back, first, str(tmp_path), 30, 0, False, False, other)
    assert [each[0] for each in found] == [step] * 3


def test_workers_that_find_a_copy_know_how_old_the_newest_checkpoint_is(gang: Gang, tmp_path: Path) -> None:
    (aged, *_) = gang.run(come_back, 210, str(tmp_path / "one"), 30, 20, False)
    assert aged[:2] == (30, "snapshot")
    assert 0 < aged[2] < 60
    assert gang.run(come_back, 220, str(tmp_path / "none"), 30, 0, False) == [(30, "snapshot", math.inf)] * 3


def _formed(attempt: int, number: int) -> str:
    return f"formed/{attempt}/{number}"


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    with Gang(3) as started:
        yield started


def test_the_highest_step_wins(gang: Gang, tmp_path: Path) -> None:
    answers = gang.run(meet, 1, [4, 5, NO_STATE], None, str(tmp_path))
    assert answers == [(5, 5.0, "rank 1")] * 3


def test_workers_that_have_only_begun_begin_at_step_0(gang: Gang, tmp_path: Path) -> None:
    assert gang.run(meet, 2, [0, NO_STATE, 0], None, str(tmp_path)) == [(0, 0.0, "start")] * 3


def test_one_rank_reads_what_the_run_starts_from_if_nobody_holds_it_yet(gang: Gang, tmp_path: Path) -> None:
    assert gang.run(meet, 4, [NO_STATE] * 3, None, str(tmp_path)) == [(0, 0.5, "start")] * 3


def test_survivors_keep_their_state_when_another_is_lost_before_it_is_overwritten(gang: Gang, tmp_path: Path) -> None:
    answers = gang.run(meet, 3, [5, 5, 0], 2, str(tmp_path))
    assert answers == [(5, 5.0, "lost"), (5, 5.0, "lost"), (0, 0.0, "left")]
