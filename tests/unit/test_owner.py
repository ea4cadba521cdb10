"""Who runs a run, also where several threads or several commands say so at once."""

import pickle
import socket
import subprocess
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest

import app.run.owner
from app.errors import RunConflict
from app.run.owner import Owner, Ownership, read_owner
from app.storage import LocalStore
from app.storage.documents import write_json
from app.storage.memory import MemoryStore
from tests.stores import claim_in_pairs

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
    written = read_owner(LocalStore(tmp_path))
    assert written is not None
    assert written.attempt == ownership.attempt == COUNT


def test_one_command_at_a_time_and_the_next_one_after_it(tmp_path: Path) -> None:
    first = Ownership.claim(LocalStore(tmp_path))
    with pytest.raises(RunConflict, match="is already running: attempt 0 on"):
        Ownership.claim(LocalStore(tmp_path))
    first.release()
    second = Ownership.claim(LocalStore(tmp_path))
    with pytest.raises(RunConflict, match="another command has taken over"):
        first.next_attempt()
    first.release()
    assert second.next_attempt() == 1
    written = read_owner(LocalStore(tmp_path))
    assert written is not None
    assert (written.attempt, written.alive) == (1, True)


def test_attempts_only_ever_grow_whichever_process_of_a_command_ends_it(tmp_path: Path) -> None:
    ownership = Ownership.claim(LocalStore(tmp_path))
    handed_over = pickle.loads(pickle.dumps(ownership))
    assert [handed_over.next_attempt() for _ in range(3)] == [1, 2, 3]
    ownership.release()
    assert Ownership.claim(LocalStore(tmp_path)).next_attempt() == 4


def test_a_run_that_is_deleted_is_not_claimed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.run.owner._RENEW_INTERVAL_S", 0.001)
    store = MemoryStore()
    Ownership.claim(store).renew_in_background()
    with app.run.owner._write_lock:  # not in the midst of a renewal
        store.delete("owner.json")
    num_before = len(store.operations)
    while len(store.operations) < num_before + 20:
        time.sleep(0.001)
    assert store.files == {}


@pytest.mark.parametrize("abandoned", [False, True], ids=["new", "left by a command that was killed"])
@pytest.mark.parametrize("num_pairs", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_of_two_commands_that_start_together_one_gets_the_run(tmp_path: Path, abandoned: bool, num_pairs: int) -> None:
    stores = [LocalStore(tmp_path / f"run-{number}") for number in range(num_pairs)]
    if abandoned:
        for store in stores:
            write_json(store, "owner.json", asdict(an_owner(pid=no_process())))
    assert claim_in_pairs(stores) == [1] * num_pairs
    assert [store.list("") for store in stores] == [["owner.json"]] * num_pairs


@pytest.mark.parametrize(
    ("host", "age_s", "waits"), [("here", 0.0, False), ("elsewhere", 25.0, False), ("elsewhere", 0.0, True)]
)
def test_a_command_that_was_killed_while_it_claimed_is_waited_for_until_its_claim_expires(
    monkeypatch: pytest.MonkeyPatch, host: str, age_s: float, waits: bool
) -> None:
    store = MemoryStore()
    where = socket.gethostname() if host == "here" else host
    left = an_owner(pid=no_process(), host=where, renewed=time.time() - age_s)
    write_json(store, "claim-left.json", asdict(left))
    started = time.monotonic()
    if waits:
        monkeypatch.setattr("app.run.owner._STALE_S", 0.4)
        monkeypatch.setattr("app.run.owner._LONGEST_DELAY_S", 0.1)
    Ownership.claim(store)
    assert (time.monotonic() - started > 0.3) == waits
    assert list(store.files) == ["owner.json"]


def test_a_claim_that_never_ends_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.run.owner._STALE_S", 0.2)
    store = MemoryStore()
    write_json(store, "claim-left.json", asdict(an_owner(host="elsewhere", renewed=time.time() + 3600)))
    with pytest.raises(RunConflict, match="is being claimed by another command"):
        Ownership.claim(store)
    assert list(store.files) == ["claim-left.json"]


def test_who_was_too_slow_to_claim_claims_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others take an announcement that has expired for one of a command that was killed."""
    monkeypatch.setattr("app.run.owner._STALE_S", 0.4)

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
