"""How a committed checkpoint is read back, and what follows from damage."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from steadfast.checkpoint import durable
from steadfast.checkpoint.catalog import Catalog, path_of
from steadfast.checkpoint.durable import Checkpoints, Fingerprints
from steadfast.checkpoint.manifest import FileDigest, Manifest
from steadfast.checkpoint.writer import Writer
from steadfast.config import CheckpointConfig
from steadfast.plan import Amendments, End
from steadfast.run import events
from steadfast.world.runtime import World
from tests.support.events import notices
from tests.support.memory_store import MemoryStore

STEP = 7
SIZE = 3
NAMES = [f"{path_of(STEP)}/file-{rank}" for rank in range(SIZE)]
AS_PLANNED = Amendments()


def save(
    catalogs: list[Catalog],
    replicated: bool = False,
    damaged: int | None = None,
    amendments: Amendments = AS_PLANNED,
) -> list[events.Event | None]:
    """Commit a step whose files all ranks have written, one of them damaged, and return what each rank reports."""
    catalogs[0].commit(Manifest(STEP - 2, 1, SIZE, 0.0, "", {}))
    groups = cast(Any, SimpleNamespace(store=dist.HashStore()))
    parallel = cast(Any, SimpleNamespace(survivors_hold_all=replicated))

    def work(rank: int) -> events.Event | None:
        world = World(rank, SIZE, 1, groups, amendments, replica_size=SIZE)
        checkpoints = Checkpoints(catalogs[rank], world, parallel, Writer(), Fingerprints(""))
        data = f"{rank}".encode() * 100
        catalogs[rank].write(STEP, f"file-{rank}", [data[:-1] if rank == damaged else data])
        file = f"file-{rank}", FileDigest(hashlib.sha256(data).hexdigest(), len(data))
        pending = cast(Any, SimpleNamespace(step=STEP, metrics={}, file=file, began_s=0.0, blocked_s=0.0))
        pending.check = lambda: None
        manifest = checkpoints.commit(pending, attempt=1)
        return None if manifest is None else checkpoints.finish(pending, manifest)

    ranks = range(1 if replicated else SIZE)
    with ThreadPoolExecutor(SIZE) as threads:
        return list(threads.map(work, ranks))


@pytest.fixture
def catalogs() -> list[Catalog]:
    """The storage of a run, as each rank sees it."""
    stores = [MemoryStore() for _ in range(SIZE)]
    for store in stores:
        store.files = stores[0].files
    return [Catalog(store, CheckpointConfig(keep_last=1)) for store in stores]


def files_read(catalog: Catalog) -> set[str]:
    return {name for kind, name in cast(MemoryStore, catalog.store).operations if kind == "read" and name in NAMES}


def test_each_rank_reads_the_file_of_the_next_rank_back(catalogs: list[Catalog]) -> None:
    told = save(catalogs)
    assert [type(event) for event in told] == [events.Checkpoint, type(None), type(None)]
    assert [files_read(catalog) for catalog in catalogs] == [{NAMES[1]}, {NAMES[2]}, {NAMES[0]}]
    assert catalogs[0].steps() == [STEP]


def test_a_manifest_holds_the_changes_to_the_plan_that_events_may_lose(catalogs: list[Catalog]) -> None:
    save(catalogs, amendments=Amendments(frozenset([STEP - 1, STEP + 1]), (End(5, 60),), 4))
    manifest = catalogs[0].manifest(STEP)
    assert manifest is not None
    assert (manifest.skipped, manifest.ends, manifest.forward_size) == ([STEP - 1], [[5, 60]], 4)


@pytest.mark.parametrize("look", ["newest", "lacks"])
def test_a_damaged_manifest_is_told_whoever_finds_it(
    catalogs: list[Catalog], monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    monkeypatch.setattr(durable, "gather_numbers", lambda number, group: torch.tensor([number]))
    monkeypatch.setattr(durable, "any_rank", lambda found, group: found)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda objects, src, group: None)
    catalogs[0].store.commit(f"{path_of(STEP)}/manifest.json", b"{")
    catalogs[0].commit(Manifest(STEP - 2, 1, SIZE, 0.0, "", {}))
    parallel, groups = cast(Any, SimpleNamespace(survivors_hold_all=True)), cast(Any, SimpleNamespace(control=None))
    checkpoints = Checkpoints(catalogs[0], World(0, 1, 1, groups, Amendments()), parallel, Writer(), Fingerprints(""))
    assert checkpoints.newest().step == STEP - 2 if look == "newest" else checkpoints.lacks(STEP, ())
    (event,) = checkpoints.news()
    assert f"checkpoint at step {STEP} is damaged and will not be used: " in event.line()
    assert checkpoints.news() == []


def test_a_checkpoint_of_a_step_that_is_left_out_now_is_passed_over_and_told(
    catalogs: list[Catalog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "any_rank", lambda found, group: found)
    catalogs[0].commit(Manifest(STEP, 1, SIZE, 0.0, "", {}))
    parallel, groups = cast(Any, SimpleNamespace(survivors_hold_all=True)), cast(Any, SimpleNamespace(control=None))
    world = World(0, 1, 1, groups, Amendments(skip=frozenset([STEP - 1])))
    checkpoints = Checkpoints(catalogs[0], world, parallel, Writer(), Fingerprints(""))
    assert checkpoints.lacks(STEP, ())
    assert checkpoints.lacks(STEP, ())
    assert [event.line() for event in checkpoints.news()] == [
        f"checkpoint at step {STEP} is not used and will be deleted: it holds a step that was left out"
    ]


@pytest.mark.parametrize("damaged", range(SIZE))
def test_nothing_is_deleted_for_a_checkpoint_with_a_damaged_file(catalogs: list[Catalog], damaged: int) -> None:
    told = save(catalogs, damaged=damaged)[0]
    error = f"file-{damaged} has 99 bytes where 100 were written, although it was written a moment ago"
    (failed,) = notices([told] if told else [], "checkpoint_failed")
    assert failed["error"].endswith(error)
    assert catalogs[0].steps() == [STEP - 2]
    assert catalogs[0].quarantined().keys() == {STEP}


def test_a_state_that_one_rank_has_written_is_read_back_by_it_and_written_again_if_damaged(
    catalogs: list[Catalog],
) -> None:
    with pytest.raises(OSError, match="file-0 has 99 bytes"):
        save(catalogs, replicated=True, damaged=0)
    assert catalogs[0].steps() == [STEP - 2]
    assert isinstance(save(catalogs, replicated=True)[0], events.Checkpoint)
    assert catalogs[0].steps() == [STEP]
