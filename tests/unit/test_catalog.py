"""What lies on storage: what counts as a checkpoint, what is found to be damaged, and what is deleted."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from steadfast.checkpoint.catalog import Catalog, Damaged, of_attempt, path_of
from steadfast.checkpoint.manifest import FileDigest, Manifest, parse_manifest
from steadfast.checkpoint.writer import Dropped
from steadfast.commands.doctor import examine
from steadfast.config import CheckpointConfig
from steadfast.errors import StorageError
from steadfast.run.directory import RunDirectory
from steadfast.run.events import Rollback
from steadfast.storage import LocalStore
from tests.support.memory_store import MemoryStore

NOTHING = frozenset[int]()
LAST_TWO = CheckpointConfig(keep_last=2)


def go_on() -> None:
    pass


def commit(catalog: Catalog, step: int, skipped: tuple[int, ...] = (), **metrics: float) -> Manifest:
    files = {}
    for name in ("a", "b"):
        data = f"{step}{name}".encode() * 100
        catalog.write(step, name, [data[:50], data[50:]])
        files[name] = FileDigest(hashlib.sha256(data).hexdigest(), len(data))
    manifest = Manifest(step, 1, 2, 0.0, "data", files, list(skipped), metrics)
    catalog.commit(manifest)
    return manifest


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def catalog(store: MemoryStore) -> Catalog:
    return Catalog(store, LAST_TWO)


def test_a_folder_without_a_manifest_is_no_checkpoint(catalog: Catalog) -> None:
    catalog.write(7, "a", [b"half of it"])
    assert catalog.steps() == [7]
    assert catalog.manifest(7) is None
    manifest = commit(catalog, 7, (3,), loss=0.5)
    assert catalog.manifest(7) == manifest
    catalog.verify(manifest)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: None, "step-00000007/b is missing"),
        (lambda data: data[:-1], "b has 199 bytes where 200 were written"),
        (lambda data: data + b"7", "b has 201 bytes where 200 were written"),
        (lambda data: data[:9] + bytes([data[9] ^ 1]) + data[10:], "b has other contents than were written"),
    ],
)
def test_damage_is_found_and_the_file_is_named(
    catalog: Catalog, store: MemoryStore, damage: Callable[[bytes], bytes | None], said: str
) -> None:
    manifest = commit(catalog, 7)
    name = f"{path_of(7)}/b"
    damaged = damage(store.files.pop(name))
    if damaged is not None:
        store.files[name] = damaged
    with pytest.raises(Damaged, match=said):
        catalog.verify(manifest)
    catalog.verify(manifest, ["a"])


def test_each_bit_of_a_manifest_matters(catalog: Catalog, store: MemoryStore) -> None:
    manifest = commit(catalog, 7)
    data = manifest.dump()
    for at in range(len(data)):
        flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        try:
            assert parse_manifest(flipped) == manifest, f"byte {at}"  # white space is not a part of it
        except ValueError:
            continue
    store.files[f"{path_of(7)}/manifest.json"] = data[:-9]
    with pytest.raises(Damaged, match=r"step-00000007: manifest.json is damaged"):
        catalog.manifest(7)
    with pytest.raises(ValueError, match="damaged: its digest"):
        parse_manifest(data.replace(b'"version": 2', b'"version": 3'))  # which nobody has signed
    store.files[f"{path_of(9)}/manifest.json"] = data  # a folder that was renamed
    with pytest.raises(Damaged, match=r"step-00000009: manifest.json is of step 7"):
        catalog.manifest(9)


@pytest.mark.parametrize(
    "data", [b'{"version": 1, "step": 7}', replace(Manifest(7, 1, 2, 0.0, "data", {}), version=3).dump()]
)
def test_a_checkpoint_of_another_version_is_no_damaged_one(catalog: Catalog, store: MemoryStore, data: bytes) -> None:
    store.files[f"{path_of(7)}/manifest.json"] = data
    with pytest.raises(StorageError, match=r"memory/checkpoints/step-00000007: .* is of version [13], .* run.name"):
        catalog.manifest(7)
    assert "is of version" in next(examine(catalog)).what


def test_quarantined_checkpoint_is_not_found_until_it_is_written_anew(catalog: Catalog, store: MemoryStore) -> None:
    commit(catalog, 7)
    commit(catalog, 9)
    catalog.quarantine(9, "a is missing")
    assert (catalog.steps(), catalog.quarantined()) == ([7], {9: "a is missing"})
    store.files[f"{path_of(9)}.quarantined.json"] = b""  # counts whatever is in it
    assert (catalog.steps(), catalog.quarantined()) == ([7], {9: "the marker does not say why"})
    commit(catalog, 9)
    assert (catalog.steps(), catalog.quarantined()) == ([9, 7], {})


def test_the_last_ones_stay_and_what_was_never_committed_goes(catalog: Catalog) -> None:
    commit(catalog, 1)
    catalog.quarantine(1, "old")
    catalog.write(2, "a", [b"never committed"])
    for step in (3, 5, 7):
        newest = commit(catalog, step)
    catalog.write(9, "a", [b"under way"])
    catalog.retire(newest, NOTHING, go_on)
    assert catalog.steps() == [9, 7, 5]
    assert catalog.quarantined() == {}


def test_a_checkpoint_that_a_bad_step_went_into_is_deleted(catalog: Catalog) -> None:
    for step in (3, 5, 9):
        commit(catalog, step)
    newest = commit(catalog, 7, (5,))
    catalog.retire(newest, frozenset({5}), go_on)
    assert catalog.steps() == [7, 3]


def test_files_of_former_attempts_go_and_those_of_later_ones_stay(catalog: Catalog, store: MemoryStore) -> None:
    for attempt in (8, 9, 10):
        catalog.write(7, f"{of_attempt(attempt)}-rank-00001-0001", [b"x"])
    newest = replace(commit(catalog, 7), attempt=9)
    catalog.retire(newest, NOTHING, go_on)
    left = [f"{of_attempt(attempt)}-rank-00001-0001" for attempt in (9, 10)]
    assert store.list(path_of(7)) == ["a", *left, "b", "manifest.json"]


def test_half_written_marker_goes_and_files_of_others_stay(catalog: Catalog, store: MemoryStore) -> None:
    catalog.quarantine(9, "damaged")
    store.files["checkpoints/.step-00000009.quarantined.json.123"] = b"{"
    store.files["checkpoints/README"] = b"mine"
    catalog.retire(commit(catalog, 7), NOTHING, go_on)
    assert store.list("checkpoints") == ["README", "step-00000007", "step-00000009.quarantined.json"]


def test_what_cannot_be_deleted_keeps_nothing_else(catalog: Catalog, store: MemoryStore) -> None:
    for step in (3, 5, 7, 9):
        newest = commit(catalog, step)
    delete = store.delete

    def refuse(name: str) -> None:
        if name.startswith(path_of(5)):
            raise PermissionError(f"{name}: not permitted")
        delete(name)

    store.delete = refuse
    with pytest.raises(PermissionError, match="step-00000005"):
        catalog.retire(newest, NOTHING, go_on)
    assert catalog.steps() == [9, 7, 5]


@pytest.mark.parametrize("step", [1, 3])
def test_catalog_finds_no_half_deleted_checkpoint_when_its_command_is_killed(
    catalog: Catalog, store: MemoryStore, step: int
) -> None:
    for committed in (1, 3, 5, 7):
        newest = commit(catalog, committed)
    catalog.quarantine(1, "damaged")
    delete = store.delete

    def delete_half(name: str) -> None:
        if name == path_of(step):
            delete(f"{name}/a")
            raise KeyboardInterrupt
        delete(name)

    store.delete = delete_half
    with pytest.raises(KeyboardInterrupt):
        catalog.retire(newest, NOTHING, go_on)
    assert [found for found in catalog.steps() if catalog.manifest(found)] == [7, 5]


def test_catalog_reads_only_the_new_manifest_when_it_retires(store: MemoryStore) -> None:
    catalog = Catalog(store, CheckpointConfig(keep_last=1, keep_every=10))
    for step in range(10, 60, 10):
        newest = commit(catalog, step)
        store.operations.clear()
        catalog.retire(newest, NOTHING, go_on)
        assert [name for verb, name in store.operations if verb == "read"] == [f"{path_of(step)}/manifest.json"]
    # Steps left out since then count against known manifests too, and a rewritten checkpoint is read again.
    catalog.retire(commit(catalog, 50, (40,)), frozenset({40}), go_on)
    assert catalog.steps() == [50, 30, 20, 10]


def test_who_is_told_to_stop_deletes_nothing_more(catalog: Catalog) -> None:
    for step in (3, 5, 7):
        newest = commit(catalog, step)

    def stop() -> None:
        raise Dropped

    with pytest.raises(Dropped):
        catalog.retire(newest, NOTHING, stop)
    assert catalog.steps() == [7, 5, 3]


def test_lines_that_a_checkpoint_depends_on_are_on_the_disk_before_its_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(LocalStore(tmp_path))
    done: list[str] = []
    link = "/proc/self/fd/{}".format
    monkeypatch.setattr("os.fsync", lambda descriptor: done.append(Path(os.readlink(link(descriptor))).name))
    directory.record(Rollback(steps=(6,), cause="nan"))
    assert done[:1] == ["events.jsonl"]
    (tmp_path / "steps.jsonl").write_text("{}")
    done.clear()
    Catalog(directory.store).commit(Manifest(7, 1, 1, 0.0, "", {}))
    files = [name for name in done if "json" in name]
    assert files[:2] == ["steps.jsonl", "events.jsonl"]
    assert files[2].startswith(".manifest.json")
    done.clear()
    directory.write_summary({"status": "finished", "step": 7, "metrics": {}})
    assert {"steps.jsonl", "events.jsonl"} < set(done[: done.index(next(name for name in done if "summary" in name))])
