"""Files of libraries that know no buckets, on their way to one."""

from __future__ import annotations

from pathlib import Path

from app.storage import LocalStore
from app.storage.memory import MemoryStore
from app.telemetry.spool import Spool


def test_to_a_bucket_go_the_files_that_have_changed() -> None:
    store = MemoryStore()
    spool = Spool(store, "tensorboard")
    (spool.path / "deeper").mkdir()
    (spool.path / "one").write_bytes(b"1")
    (spool.path / "deeper" / "two").write_bytes(b"2")
    spool.upload()
    (spool.path / "one").write_bytes(b"1, 2")
    spool.close()
    committed = [name for verb, name in store.operations if verb == "commit"]
    assert sorted(committed) == ["tensorboard/deeper/two", "tensorboard/one", "tensorboard/one"]
    assert store.read("tensorboard/one") == b"1, 2"
    assert not spool.path.exists()


def test_on_a_disk_files_are_where_they_are_to_be(tmp_path: Path) -> None:
    spool = Spool(LocalStore(tmp_path), "tensorboard")
    spool.close()
    assert spool.path == tmp_path / "tensorboard"
    assert not spool.due
