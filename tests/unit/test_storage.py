"""Each store keeps to one contract. A bucket's, over a network that fails, is in tests/dist/test_s3.py."""

import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from steadfast.storage import LocalStore, Store, open_store
from steadfast.storage.arrow import ArrowStore
from tests.support.memory_store import MemoryStore
from tests.support.stores import StoreContract


class TestContract(StoreContract):
    @pytest.fixture(params=["local", "memory", "arrow"])
    def store(self, request: pytest.FixtureRequest, tmp_path: Path) -> Store:
        if request.param == "memory":
            return MemoryStore()
        return LocalStore(tmp_path) if request.param == "local" else ArrowStore(f"file://{tmp_path}/")


def test_the_location_says_which_store_it_is_and_one_on_a_disk_does_not_wait_for_pyarrow() -> None:
    assert open_store("runs") == LocalStore(Path("runs"))
    assert open_store("s3://bucket/runs") == ArrowStore("s3://bucket/runs")
    program = "import steadfast.storage, sys; steadfast.storage.open_store('runs'); sys.exit('pyarrow' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    "uri", ["s3://key:secret@bucket/runs", "s3://secret@bucket/runs", "gs://user:secret@bucket", "s3://b?secret_key=x"]
)
def test_no_credentials_in_what_is_shown(uri: str) -> None:
    with pytest.raises(ValueError, match=r"environment|secret_key: s3 takes only endpoint_override") as raised:
        open_store(uri)
    assert "secret@" not in str(raised.value)


def test_errors_of_this_machine_keep_their_kind_and_are_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    started = time.monotonic()
    with pytest.raises(OSError, match="file/below"):
        ArrowStore(f"file://{tmp_path}").commit("file/below", b"x")
    with pytest.raises(OSError, match="file/below"):
        ArrowStore(f"file://{tmp_path}").write("file/below", [b"x"])
    with pytest.raises(OSError, match="nowhere://bucket/name"):
        ArrowStore("nowhere://bucket?x=1").read("name")
    assert time.monotonic() - started < 5


def test_a_half_committed_file_of_a_file_system_leaves_the_old_one(tmp_path: Path) -> None:
    store = ArrowStore(f"file://{tmp_path}")
    store.commit("file", b"old")
    (tmp_path / f".file.{socket.gethostname()}-{os.getpid()}").mkdir()  # stands in the way
    with pytest.raises(OSError, match=r"file"):
        store.commit("file", b"new")
    assert store.read("file") == b"old"


def test_threads_may_commit_the_same_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, have_written = LocalStore._write, threading.Barrier(2)

    def write(*args: Any) -> None:
        honest(*args)
        have_written.wait(20)

    monkeypatch.setattr(LocalStore, "_write", write)
    store = LocalStore(tmp_path)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda data: store.commit("file", data), (b"one", b"two")))
    assert store.read("file") in (b"one", b"two")
    assert store.list("") == ["file"]


def test_google_storage_that_does_not_answer_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadfast.storage.arrow._RETRY_BUDGET_S", 0.2)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        store = open_store(f"gs://anonymous@b/runs?scheme=http&endpoint_override=127.0.0.1:{nobody.getsockname()[1]}")
        started = time.monotonic()
        with pytest.raises(OSError, match="gs://anonymous@b/runs/file"):
            store.read("file")
    assert time.monotonic() - started < 15


def test_a_link_is_deleted_and_what_it_leads_to_is_kept_and_not_counted(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_bytes(b"x" * 5000)
    (tmp_path / "store").mkdir()
    store = LocalStore(tmp_path / "store")
    for name in ("folder", "gone"):
        (store.path / name).symlink_to(tmp_path / "elsewhere" if name == "folder" else tmp_path / "nowhere")
    assert store.num_bytes("") < 1000
    store.delete("folder")
    store.delete("gone")
    assert store.list("") == []
    assert (tmp_path / "elsewhere" / "file").exists()
