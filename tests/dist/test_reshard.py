"""Any number of ranks reads what any other number wrote, sharded or not: the same bits."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from steadfast.checkpoint.catalog import Catalog
from steadfast.checkpoint.durable import Checkpoints, Fingerprints
from steadfast.checkpoint.restore import restore
from steadfast.checkpoint.snapshots import Snapshots
from steadfast.checkpoint.state import flatten, sha256
from steadfast.loop.worker_state import WorkerState
from steadfast.parallel import arrange, build_parallel
from steadfast.run.directory import RunDirectory
from steadfast.world.groups import WorldRank
from steadfast.world.runtime import Outcome, WorkerProcess, form_world
from tests.support.gang import Gang, Member
from tests.support.reference import CPU
from tests.support.small import small

WORLDS = [
    *((f"kind: {kind}", size) for kind in ("ddp", "fsdp") for size in (1, 2, 3, 4)),
    *(("kind: pipeline", size) for size in (2, 4)),
    ("kind: fsdp, tensor_size: 2, shard_size: 1", 4),
    ("kind: fsdp, tensor_size: 2", 4),
    ("kind: pipeline, tensor_size: 2", 4),
]
NUM_PROCESSES = 4
ATTEMPTS = itertools.count(1)  # the gang's store remembers those of former tests: none may come twice


def written_or_read(
    member: Member, attempt: int, folder: str, kind: str, size: int, writes: bool
) -> dict[str, str] | None:
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
            snapshots = Snapshots(world, None, parallel, state)
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
        written_or_read(member, attempt, folder, kind, size, False)
    finally:
        Catalog.readers = honest
    return num_read


def test_each_header_of_a_checkpoint_is_read_by_one_rank(gang: Gang, tmp_path: Path) -> None:
    gang.run(written_or_read, next(ATTEMPTS), str(tmp_path), "kind: fsdp", 3, True)
    assert gang.run(headers_read, next(ATTEMPTS), str(tmp_path), "kind: fsdp", 4) == [1, 1, 1, 0]
    assert gang.run(headers_read, next(ATTEMPTS), str(tmp_path), "kind: fsdp", 2) == [2, 1, 0, 0]


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
def gang() -> Iterator[Gang]:
    with Gang(NUM_PROCESSES) as started:
        yield started


# Every kind and size of world writes. The next one of WORLDS has another size, the fifth one from it another kind too.
@pytest.mark.parametrize(
    "distances",
    [(1, 5), pytest.param(range(len(WORLDS)), marks=pytest.mark.slow)],
    ids=["two readers each", "all readers"],
)
def test_one_state_has_one_digest_whoever_wrote_and_whoever_reads_it(
    gang: Gang, tmp_path: Path, distances: Sequence[int]
) -> None:
    digests = set()
    for index, (kind, size) in enumerate(WORLDS):
        folder = str(tmp_path / str(index))
        readers = [WORLDS[(index + distance) % len(WORLDS)] for distance in distances]
        for task in [(kind, size, True), *((*reader, False) for reader in readers)]:
            answers = gang.run(written_or_read, next(ATTEMPTS), folder, *task)
            found = {(answer["model"], answer["optimizer"]) for answer in answers if answer}
            assert len(found) == 1, task
            digests |= found
    assert len(digests) == 1
