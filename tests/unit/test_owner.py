"""Who runs a run, also where a process has several threads that say so."""

import pickle
import threading
import time
from pathlib import Path

import pytest

import app.owner
from app.errors import RunConflict
from app.owner import Ownership, read_owner
from app.storage import LocalStore
from app.storage.memory import MemoryStore

COUNT = 300


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
    monkeypatch.setattr("app.owner._RENEW_S", 0.001)
    store = MemoryStore()
    Ownership.claim(store).keep()
    with app.owner._writing:  # not in the midst of a renewal
        store.delete("owner.json")
    num_before = len(store.operations)
    while len(store.operations) < num_before + 20:
        time.sleep(0.001)
    assert store.files == {}
