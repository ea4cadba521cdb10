"""Any number of ranks reads what any other wrote, the same bits; and what a worker holds is its own until then."""

import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from steadfast.checkpoint.catalog import Catalog
from steadfast.checkpoint.durable import Checkpoints, Fingerprints
from steadfast.checkpoint.node_memory import ProcessMemory
from steadfast.checkpoint.restore import restore
from steadfast.checkpoint.snapshots import Snapshots
from steadfast.checkpoint.state import HeldState, flatten, sha256
from steadfast.checkpoint.writer import Writer
from steadfast.config import DdpConfig, Every
from steadfast.loop.worker_state import WorkerState
from steadfast.parallel import arrange, build_parallel
from steadfast.parallel.precision import Precision
from steadfast.parallel.replicated import ReplicatedParallelism
from steadfast.run.directory import RunDirectory
from steadfast.storage import LocalStore
from steadfast.world.groups import PeerLost, WorldRank
from steadfast.world.runtime import Outcome, WorkerProcess, form_world
from tests.support.gang import Gang, Member
from tests.support.reference import CPU
from tests.support.small import small

NO_STATE = -1
BOUND = Every(30, "seconds")


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
        snapshots = Snapshots(world, None, parallel, state, BOUND)
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
            snapshots = Snapshots(world, memory, parallel, state, BOUND, data)
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
    assert known or all(0 < each[2] < 60 for each in found)  # the age of the newest checkpoint


def test_a_copy_that_has_changed_is_no_candidate(gang: Gang, tmp_path: Path) -> None:
    found = gang.run(come_back, 250, str(tmp_path), 30, 20, True, True)
    assert [each[:2] for each in found] == [(20, "checkpoint")] * 3


@pytest.mark.parametrize(("first", "other", "step"), [(300, "data", 0), (310, "model", 0), (320, "hooks", 30)])
def test_a_copy_of_another_run_is_no_candidate(gang: Gang, tmp_path: Path, first: int, other: str, step: int) -> None:
    found = gang.run(come_back, first, str(tmp_path), 30, 0, False, False, other)
    assert [each[0] for each in found] == [step] * 3
    assert not step or {each[2] for each in found} == {math.inf}  # there is no checkpoint


def _formed(attempt: int, number: int) -> str:
    return f"formed/{attempt}/{number}"


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    with Gang(3) as started:
        yield started


@pytest.mark.parametrize(
    ("attempt", "held", "leaves", "expected"),
    [
        pytest.param(1, [4, 5, NO_STATE], None, [(5, 5.0, "rank 1")] * 3, id="the highest step wins"),
        pytest.param(2, [0, NO_STATE, 0], None, [(0, 0.0, "start")] * 3, id="all have only begun"),
        pytest.param(4, [NO_STATE] * 3, None, [(0, 0.5, "start")] * 3, id="one rank reads what the run starts from"),
        # Survivors keep their state when another is lost before it is overwritten.
        pytest.param(3, [5, 5, 0], 2, [(5, 5.0, "lost"), (5, 5.0, "lost"), (0, 0.0, "left")], id="one is lost"),
    ],
)
def test_ranks_agree_on_the_state_to_restore(
    gang: Gang, tmp_path: Path, attempt: int, held: list[int], leaves: int | None, expected: list[Any]
) -> None:
    assert gang.run(meet, attempt, held, leaves, str(tmp_path)) == expected


WORLDS = [
    *((f"kind: {kind}", size) for kind in ("ddp", "fsdp") for size in (1, 2, 3, 4)),
    *(("kind: pipeline", size) for size in (2, 4)),
    ("kind: fsdp, tensor_size: 2, shard_size: 1", 4),
    ("kind: fsdp, tensor_size: 2", 4),
    ("kind: pipeline, tensor_size: 2", 4),
]
NUM_PROCESSES = 4
ATTEMPTS = itertools.count(1)  # the gang's store remembers those of former tests: none may come twice


def digests_of(member: Member, attempt: int, folder: str, kind: str, size: int, writes: bool) -> dict[str, str] | None:
    """The digests of what a world of `size` wrote, or found."""
    if member.number >= size:
        return None
    config = small(Path(folder), f"parallel={{{kind}}}", "model.dropout=0", "model.embed_dim=20")
    world = form_world(member.store, WorldRank(member.number, size, attempt), WorkerProcess(CPU))
    try:
        worker = WorkerState(config, CPU)
        world = arrange(world, config.parallel)
        parallel = build_parallel(config.parallel, world, worker.precision)
        _, state = worker.prepare(world, parallel)
        catalog = Catalog(RunDirectory.of(config).store)
        checkpoints = Checkpoints(catalog, world, parallel, worker.writer, Fingerprints("data"))
        if writes:
            fill(state)
            checkpoints.save(7, state, {}, Outcome("finished", 7))
        else:
            snapshots = Snapshots(world, None, parallel, state, BOUND)
            restored = restore(state, worker.held, worker.load_initial, checkpoints, snapshots)
            assert restored.step == 7
        return {part: sha256(tensors, world) for part, tensors in state.items()}
    finally:
        world.groups.destroy()


def headers_read(member: Member, attempt: int, folder: str, kind: str, size: int) -> int:
    """The number of headers that a rank reads when its world restores a checkpoint."""
    honest = Catalog.readers
    num_read = 0

    def readers(self: Catalog, manifest: Any) -> list[Any]:
        return [partial(counted, read) for read in honest(self, manifest)]

    def counted(read: Any, start: int, num_bytes: int) -> bytes:
        nonlocal num_read
        num_read += start == 0
        return bytes(read(start, num_bytes))

    Catalog.readers = readers
    try:
        digests_of(member, attempt, folder, kind, size, False)
    finally:
        Catalog.readers = honest
    return num_read


def test_each_header_of_a_checkpoint_is_read_by_one_rank(four: Gang, tmp_path: Path) -> None:
    four.run(digests_of, next(ATTEMPTS), str(tmp_path), "kind: fsdp", 3, True)
    assert four.run(headers_read, next(ATTEMPTS), str(tmp_path), "kind: fsdp", 4) == [1, 1, 1, 0]
    assert four.run(headers_read, next(ATTEMPTS), str(tmp_path), "kind: fsdp", 2) == [2, 1, 0, 0]


def fill(state: dict[str, Any]) -> None:
    """Each tensor with numbers of its own, the same in every world."""
    tensors: dict[str, Any] = flatten(state)
    for name, tensor in tensors.items():
        if tensor.is_meta:  # another stage holds it
            continue
        seed = zlib.crc32(name.encode())
        whole = torch.randn(tensor.shape, dtype=tensor.dtype, generator=torch.Generator().manual_seed(seed))
        part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if part is tensor:
            tensor.detach().copy_(whole)
        elif part.numel():
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            box = tuple(slice(first, first + size) for first, size in zip(offset, part.shape, strict=True))
            part.detach().copy_(whole[box])


@pytest.fixture(scope="module")
def four() -> Iterator[Gang]:
    with Gang(NUM_PROCESSES) as started:
        yield started


# Every kind and size of world writes. The next one of WORLDS has another size, the fifth one from it another kind too.
@pytest.mark.parametrize(
    "distances",
    [(1, 5), pytest.param(range(len(WORLDS)), marks=pytest.mark.slow)],
    ids=["two readers each", "all readers"],
)
def test_one_state_has_one_digest_whoever_wrote_and_whoever_reads_it(
    four: Gang, tmp_path: Path, distances: Sequence[int]
) -> None:
    digests = set()
    for index, (kind, size) in enumerate(WORLDS):
        folder = str(tmp_path / str(index))
        readers = [WORLDS[(index + distance) % len(WORLDS)] for distance in distances]
        for task in [(kind, size, True), *((*reader, False) for reader in readers)]:
            answers = four.run(digests_of, next(ATTEMPTS), folder, *task)
            found = {(answer["model"], answer["optimizer"]) for answer in answers if answer}
            assert len(found) == 1, task
            digests |= found
    assert len(digests) == 1
