"""Files of libraries that know no buckets, on their way to one."""

from collections import Counter
from pathlib import Path

import pytest

from steadfast.storage import LocalStore
from steadfast.telemetry.spool import Spool
from tests.support.memory_store import MemoryStore


def uploads(store: MemoryStore) -> Counter[str]:
    return Counter(name for verb, name in store.operations if verb == "commit")


def test_of_a_library_that_draws_for_long_only_the_file_that_grows_is_uploaded_again() -> None:
    """As W&B lays its folder out: a file that grows, others that do not, and links, of which one leads nowhere."""
    store = MemoryStore()
    spool = Spool(store, "wandb")
    (spool.path / "run").mkdir()
    (spool.path / "run" / "config.yaml").write_text("model: gpt")
    (spool.path / "debug.log").symlink_to(spool.path / "run" / "config.yaml")
    (spool.path / "latest").symlink_to(spool.path / "run")
    (spool.path / "gone").symlink_to(spool.path / "nowhere")
    with (spool.path / "run" / "history").open("ab", buffering=0) as history:
        for _ in range(5):
            history.write(b"row")
            spool.upload()
            spool.upload()
    spool.close()
    assert uploads(store) == {"wandb/run/history": 5, "wandb/run/config.yaml": 1}
    assert store.read("wandb/run/history") == 5 * b"row"
    assert not spool.path.exists()


def test_a_file_that_vanishes_while_others_are_uploaded_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    spool = Spool(store, "wandb")
    for name in ("one", "two"):
        (spool.path / name).write_bytes(b"1")
    read = Path.read_bytes

    def vanish(path: Path) -> bytes:
        (spool.path / "one").unlink(missing_ok=True)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", vanish)
    spool.close()
    assert uploads(store)["wandb/two"] == 1


def test_on_a_disk_files_are_where_they_are_to_be(tmp_path: Path) -> None:
    spool = Spool(LocalStore(tmp_path), "tensorboard")
    spool.close()
    assert spool.path == tmp_path / "tensorboard"


def test_a_folder_in_another_folder_is_uploaded_as_well() -> None:
    store = MemoryStore()
    spool = Spool(store, "trackers/mine:Tracker")
    spool.note(3, {"train/loss": 1.0})
    spool.close()
    assert uploads(store) == {"trackers/mine:Tracker/drawn.json": 1}
