"""Who runs a run, also where several threads or several commands say so at once."""

import json
import pickle
import shutil
import socket
import subprocess
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import steadfast.run.owner
from steadfast.checkpoint.catalog import Catalog
from steadfast.checkpoint.durable import Checkpoints, Fingerprints
from steadfast.checkpoint.manifest import FileDigest
from steadfast.checkpoint.writer import Superseded, Writer
from steadfast.config import DdpConfig
from steadfast.errors import RunConflict, StorageError
from steadfast.launch.resume import release_run
from steadfast.parallel.precision import Precision
from steadfast.parallel.replicated import ReplicatedParallelism
from steadfast.run.directory import RunDirectory
from steadfast.run.events import Failure
from steadfast.run.owner import Owner, Ownership, read_key, read_owner
from steadfast.storage import LocalStore
from steadfast.storage.documents import write_json
from steadfast.world.runtime import World
from tests.support.memory_store import MemoryStore
from tests.support.stores import claim_in_pairs

COUNT = 100


def test_renewals_and_new_attempts_of_two_threads_do_not_undo_each_other(tmp_path: Path) -> None:
    ownership = Ownership.claim(LocalStore(tmp_path))
    failures: list[BaseException] = []

    def repeat(verb: str) -> None:
        try:
            for _ in range(COUNT):
                getattr(ownership, verb)()
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=repeat, args=(verb,)) for verb in ("renew", "next_attempt")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert read_owner(LocalStore(tmp_path)).attempt == ownership.attempt == COUNT


def test_one_command_at_a_time_and_the_next_one_after_it(tmp_path: Path) -> None:
    first = Ownership.claim(LocalStore(tmp_path))
    with pytest.raises(RunConflict, match="is already running: attempt 0 on"):
        Ownership.claim(LocalStore(tmp_path))
    handed_over = pickle.loads(pickle.dumps(first))  # attempts only ever grow, whichever process of a command ends it
    assert [handed_over.next_attempt() for _ in range(3)] == [1, 2, 3]
    first.release()
    second = Ownership.claim(LocalStore(tmp_path))
    with pytest.raises(RunConflict, match="another command has taken over"):
        first.next_attempt()
    first.release()
    assert second.next_attempt() == 4
    written = read_owner(LocalStore(tmp_path))
    assert (written.attempt, written.gone) == (4, False)


def test_a_run_has_a_secret_that_its_user_alone_reads_and_that_the_next_command_keeps(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    Ownership.claim(store, "a").release()
    first = read_key(store)
    assert len(first) == 32
    assert (tmp_path / "owner.key").stat().st_mode & 0o777 == 0o600
    assert first not in (tmp_path / "owner.json").read_text()
    Ownership.claim(store, "b")
    assert read_key(store) == first
    (tmp_path / "owner.json").unlink()
    Ownership.claim(store, "c")  # of another run in the same folder
    assert read_key(store) not in ("", first)
    (tmp_path / "owner.key").write_text("")
    Ownership.claim(store, "c")
    assert len(read_key(store)) == 32


def test_a_run_that_is_deleted_is_not_claimed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadfast.run.owner._RENEW_INTERVAL_S", 0.001)
    store = MemoryStore()
    Ownership.claim(store).renew_in_background()
    with steadfast.run.owner._write_lock:  # not in the midst of a renewal
        store.delete("owner.json")
    num_before = len(store.operations)
    while len(store.operations) < num_before + 20:
        time.sleep(0.001)
    assert list(store.files) == ["owner.key"]


@pytest.mark.parametrize("abandoned", [False, True], ids=["new", "left by a command that was killed"])
@pytest.mark.parametrize("num_pairs", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_of_two_commands_that_start_together_one_gets_the_run(tmp_path: Path, abandoned: bool, num_pairs: int) -> None:
    stores = [LocalStore(tmp_path / f"run-{number}") for number in range(num_pairs)]
    if abandoned:
        for store in stores:
            write_json(store, "owner.json", asdict(an_owner(pid=no_process())))
    assert claim_in_pairs(stores) == [1] * num_pairs
    assert [store.list("") for store in stores] == [["owner.json", "owner.key"]] * num_pairs


@pytest.fixture
def short_lease(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr("steadfast.run.owner._STALE_S", 0.4)
    monkeypatch.setattr("steadfast.run.owner._RENEW_INTERVAL_S", 0.05)
    monkeypatch.setattr("steadfast.run.owner._LONGEST_DELAY_S", 0.1)
    return 0.4


@pytest.mark.parametrize(("host", "waits"), [("here", False), ("elsewhere", True)])
@pytest.mark.parametrize("clock_s", [-1e9, -25.0, 0.0, 3600.0])
def test_a_command_that_was_killed_while_it_claimed_is_waited_for_until_its_claim_expires(
    short_lease: float, host: str, clock_s: float, waits: bool
) -> None:
    """On this host it is known to be gone; of others' clocks nothing is."""
    store = MemoryStore()
    where = socket.gethostname() if host == "here" else host
    left = an_owner(pid=no_process(), host=where, renewed=time.time() + clock_s)
    write_json(store, "claim-left.json", asdict(left))
    started = time.monotonic()
    Ownership.claim(store)
    assert (time.monotonic() - started > 0.3) == waits
    assert sorted(store.files) == ["owner.json", "owner.key"]


@pytest.mark.parametrize("clock_s", [-1e9, -21.0, 21.0, 3600.0, 1e9])
def test_of_an_owner_elsewhere_the_clock_is_not_believed(short_lease: float, clock_s: float) -> None:
    """Whoever renews keeps its run however wrong its clock is, and whoever does not has lost it after a lease."""
    store = MemoryStore()
    said: list[str] = []
    alive = an_owner(host="elsewhere", renewed=time.time() + clock_s)
    write_json(store, "owner.json", asdict(alive))
    renewing = threading.Timer(0.15, lambda: write_json(store, "owner.json", asdict(replace(alive, renewed=1.0))))
    renewing.start()
    with pytest.raises(RunConflict, match="is already running: attempt 0 on elsewhere, pid 1"):
        Ownership.claim(store, say=said.append)
    renewing.join()
    began = time.monotonic()
    assert Ownership.claim(store, say=said.append).next_attempt() == 1
    assert time.monotonic() - began > short_lease
    assert len(said) == 2
    assert "was not released by attempt 0 on elsewhere, pid 1: taking over unless it shows life" in said[0]


@pytest.mark.parametrize("renewed", ["NaN", "Infinity", "-Infinity", "1e308", "-5"])
def test_a_time_that_is_none_does_not_hold_a_run_for_ever(short_lease: float, renewed: str) -> None:
    store = MemoryStore()
    store.commit("owner.json", f'{{"attempt": 7, "token": "a", "host": "b", "pid": 1, "renewed": {renewed}}}'.encode())
    assert Ownership.claim(store).next_attempt() == 8


WRITTEN: dict[str, Any] = {"attempt": 1, "token": "a", "host": "b", "pid": 1, "renewed": 1}
ODD: dict[str, list[Any]] = {"renewed": [None, "now"], "pid": ["x", 10**20], "attempt": [None, -3]}
ODD |= {"token": [5], "more": [1]}
ODD_OWNERS = [json.dumps({**WRITTEN, key: value}) for key, values in ODD.items() for value in values]


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", "5", "\0\0", "[" * 100_000, *ODD_OWNERS])
def test_an_owner_that_nobody_has_written_is_none(text: str) -> None:
    store = MemoryStore()
    store.commit("owner.json", json.dumps(WRITTEN).encode())
    assert read_owner(store).attempt == 1, "else it would not be the odd value"
    store.commit("owner.json", text.encode())
    assert read_owner(store) is None
    assert Ownership.claim(store).next_attempt() == 1


def test_what_lies_in_the_way_of_a_claim_is_told(tmp_path: Path) -> None:
    (tmp_path / "owner.json").mkdir()
    with pytest.raises(StorageError, match=r"claim on .* cannot be read or written: .*delete what is in the way"):
        Ownership.claim(LocalStore(tmp_path))


def test_who_renews_and_meets_another_has_lost_the_run(short_lease: float) -> None:
    store = MemoryStore()
    first = Ownership.claim(store)
    first.renew_in_background()
    time.sleep(0.1)
    assert (first.lost, first.holds()) == ("", True)
    write_json(store, "owner.json", asdict(an_owner(host="elsewhere")))
    deadline = time.monotonic() + 10
    while not first.lost and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "another command has taken over memory: on elsewhere, pid 1" in first.lost
    assert not first.holds()
    assert read_owner(store).host == "elsewhere"


def test_a_late_write_of_a_killed_commands_process_does_not_take_the_run_back(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    killed = replace(an_owner(pid=no_process()), attempt=1)
    write_json(store, "owner.json", asdict(killed))
    of_killed = Ownership(store, killed)
    mine = Ownership.claim(store)
    # The killed command's coordinator has read the lease before the claim, and writes it afterwards.
    write_json(store, "owner.json", asdict(replace(killed, attempt=2)))
    handed_over = pickle.loads(pickle.dumps(mine))
    assert handed_over.next_attempt() == 3
    assert mine.holds()
    with pytest.raises(RunConflict, match="another command has taken over"):
        of_killed.renew()
    # A third command's claim counts nevertheless.
    write_json(store, "owner.json", asdict(replace(an_owner(host="elsewhere"), token="a third")))
    with pytest.raises(RunConflict, match="on elsewhere, pid 1"):
        mine.renew()


@pytest.mark.parametrize("taken", [True, False])
def test_a_command_deletes_a_folder_only_as_long_as_it_is_its_own(tmp_path: Path, taken: bool) -> None:
    directory = RunDirectory(LocalStore(tmp_path / "run"))
    mine = Ownership.claim(directory.store)
    if taken:
        shutil.rmtree(tmp_path / "run")
        other = Ownership.claim(directory.store)
    release_run(directory, mine, new=True)
    assert (tmp_path / "run").exists() == taken
    if taken:
        assert other.holds()
        assert other.next_attempt() == 1


@pytest.mark.parametrize(
    ("failures", "file", "stays"),
    [
        ([], "environment.json", False),
        (["ours"], "config.yaml", False),  # bad input, which its message explains
        (["hang"], "config.yaml", True),
        (["exception", "ours"], "config.yaml", True),
        ([], "stacks/attempt-1-worker.txt", True),
        ([], "profile/memory-attempt-1-rank-0.pickle", True),
    ],
)
def test_let_go_keeps_a_run_without_a_step_if_a_message_refers_to_its_files(
    tmp_path: Path, failures: list[str], file: str, stays: bool
) -> None:
    directory = RunDirectory(LocalStore(tmp_path / "run"))
    mine = Ownership.claim(directory.store)
    directory.store.commit(file, b"something")
    for kind in failures:
        directory.record(Failure(kind=kind, error="..."))
    release_run(directory, mine, new=True)
    assert (tmp_path / "run").exists() == stays


@pytest.mark.parametrize("what", ["nothing", "began anew", "deleted"])
def test_a_command_commits_nothing_into_the_run_of_another_of_the_same_name(tmp_path: Path, what: str) -> None:
    """Both are in attempt 1."""
    directory = RunDirectory(LocalStore(tmp_path / "run"))
    assert Ownership.claim(directory.store).next_attempt() == 1
    world = World(0, 1, 1, cast(Any, None))
    parallel = ReplicatedParallelism(DdpConfig(), world, Precision(torch.device("cpu")))
    checkpoints = Checkpoints(Catalog(directory.store), world, parallel, Writer(), Fingerprints(""))
    if what != "nothing":
        shutil.rmtree(tmp_path / "run")
    if what == "began anew":
        assert Ownership.claim(directory.store).next_attempt() == 1
    pending = SimpleNamespace(step=5, metrics={}, file=("file", FileDigest("", 0)), check=lambda: None)
    if what == "nothing":
        assert checkpoints.commit(cast(Any, pending), attempt=1)
    else:
        with pytest.raises(Superseded, match="step 5 is not committed"):
            checkpoints.commit(cast(Any, pending), attempt=1)
        assert Catalog(directory.store).newest() is None


def test_a_claim_that_is_announced_again_and_again_is_not_waited_for_for_ever(short_lease: float) -> None:
    class Rival(MemoryStore):
        """Somebody else announces a claim whenever one looks."""

        def list(self, folder: str) -> list[str]:
            self.number = getattr(self, "number", 0) + 1
            name = f"claim-{self.number}.json"
            write_json(self, name, asdict(an_owner(host="elsewhere")))
            return [name]

    with pytest.raises(RunConflict, match="is being claimed by another command"):
        Ownership.claim(Rival())


def test_who_was_too_slow_to_claim_claims_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others take an announcement that has expired for one of a command that was killed."""
    monkeypatch.setattr("steadfast.run.owner._STALE_S", 0.4)

    class Slow(MemoryStore):
        def read(self, name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
            try:
                return super().read(name, start, num_bytes)
            finally:
                if name == "owner.json" and self.operations.count(("read", name)) == 1:
                    time.sleep(0.5)
                    others.append(Ownership.claim(self))

    others: list[Ownership] = []
    with pytest.raises(RunConflict, match="is already running"):
        Ownership.claim(Slow())
    assert others[0].next_attempt() == 1


def an_owner(pid: int = 1, host: str | None = None, renewed: float | None = None) -> Owner:
    return Owner(0, "a token", host or socket.gethostname(), pid, time.time() if renewed is None else renewed)


def no_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid
