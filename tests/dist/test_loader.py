"""Loading in processes of its own gives what loading in place does, errors included."""

import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from steadfast.errors import DataError, UserExit
from tests.support.loading import Noisy, Odd, loader_of, microbatches
from tests.support.programs import run_program


def test_worker_processes_give_the_same_survive_between_calls_and_end() -> None:
    expected = list(loader_of(Noisy()).steps(microbatches(0, 40)))
    loader = loader_of(Noisy(), num_workers=2)
    pids = []
    for _ in range(2):
        unfinished = loader.steps(microbatches(100, 10**6))
        next(unfinished)
        fetched = list(loader.steps(microbatches(0, 40)))
        pids.append([worker.pid for worker in loader._loader._iterator._workers])
        assert [each.microbatch for each in fetched] == [each.microbatch for each in expected]
        assert [each.digest for each in fetched] == [each.digest for each in expected]
        assert all(torch.equal(a.batch[0], b.batch[0]) for a, b in zip(fetched, expected, strict=True))
    assert pids[0] == pids[1]


def test_error_in_a_worker_process_stays_short_and_the_loader_usable() -> None:
    loader = loader_of(Odd((torch.zeros(3), 7), sample=0), num_workers=1)
    for _ in range(2):
        with pytest.raises(
            DataError, match=r"^sample \d+ is \(float32 \(\d,\), int \(\)\), expected \(float32"
        ) as raised:
            list(loader.steps(microbatches(0, 40)))
        # Its frames hold the loader, whose process would outlive the test.
        raised.value.__traceback__ = None
        del raised


TERMINATED = """
import os
import psutil
from tests.support.loading import Noisy, loader_of, microbatches

if __name__ == "__main__":
    loader = loader_of(Noisy(), num_workers=1)
    batches = loader.steps(microbatches(0, 10**6))
    next(batches)
    mine = psutil.Process().children(recursive=True)
    for each in mine:  # by another process than theirs
        os.system(f"kill -TERM {each.pid}")
    fetched = [next(batches).num_samples for _ in range(50)]
    (process,) = loader._loader._iterator._workers
    process.terminate()
    process.join(10)
    print(len(mine), fetched == [8] * 50, process.exitcode, flush=True)
    os._exit(0)
"""


def test_processes_outlive_sigterm_but_for_that_of_their_worker(tmp_path: Path) -> None:
    """In a process of its own, which has no server yet."""
    (tmp_path / "main.py").write_text(TERMINATED)
    assert run_program(tmp_path / "main.py") == "3 True 0\n"


class Unpicklable(Noisy):
    def __init__(self) -> None:
        self.transform = lambda pixels: pixels


def test_a_dataset_that_processes_cannot_take_is_refused_with_what_to_do() -> None:
    message = r"cannot pickle the dataset, its collate function or order \(.*lambda.*\); data.num_workers=0 starts"
    with pytest.warns(UserWarning, match="pickle error"), pytest.raises(DataError, match=message):
        loader_of(Unpicklable(), num_workers=1).steps(microbatches(0, 40))
    assert next(loader_of(Unpicklable()).steps(microbatches(0, 40))).num_samples == 8


class Quits(Noisy):
    def __getitem__(self, index: int) -> Any:
        sys.exit("no more")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_would_end_the_process_is_an_exception_like_any_other(num_workers: int) -> None:
    with pytest.raises(UserExit, match=r"sys\.exit in your own code \(no more\)") as raised:
        next(loader_of(Quits(), num_workers=num_workers).steps(microbatches(0, 40)))
    assert "test_loader.py" in "".join(traceback.format_exception(raised.value))
    # Its frames hold the loader, whose process would outlive the test.
    raised.value.__traceback__ = None
    del raised
