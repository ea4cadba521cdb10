"""Loading in processes of its own gives what loading in place does, errors included."""

import errno
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import psutil
import pytest
import torch

from steadfast.data.fingerprint import fingerprint
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


class Fatal(Noisy):
    """One sample ends its process, or does not come."""

    is_augmented = False

    def __init__(self, act: str, sample: int = 7) -> None:
        self.act, self.sample = act, sample

    def __getitem__(self, index: int) -> Any:
        if index == self.sample:
            exec(self.act)
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        ("import os; os.kill(os.getpid(), 9)", r"by signal 9 while reading sample 7 \(epoch 1\), perhaps for"),
        ("import os; os.kill(os.getpid(), 11)", r"by signal 11 while reading sample 7 \(epoch 1\)$"),
        ("import os; os._exit(3)", r"ended with exit code 3 while reading sample 7 \(epoch 1\)$"),
        ("raise EOFError('cut')", r"cut\nwhile reading sample 7 \(epoch 1\)$"),
    ],
)
def test_a_loader_process_that_dies_is_reported_with_its_samples(act: str, message: str) -> None:
    loader = loader_of(Fatal(act), num_workers=1, order="sequential", validation_fraction=0.0)
    with pytest.raises((RuntimeError, EOFError), match=message) as raised:
        list(loader.steps(microbatches(0, 40)))
    raised.value.__traceback__ = None
    del raised


class Unsendable:
    """Batch that cannot be sent, for example because its tensors find no room in /dev/shm."""

    def __init__(self, error: str) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise RuntimeError(self.error)


class Refused(Noisy):
    def __init__(self, error: str) -> None:
        self.error = error

    def read_batch(self, ids: Any) -> Unsendable:
        return Unsendable(self.error)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            "unable to allocate shared memory(shm): No space left on device (28)",
            r"^/dev/shm had no room .*: enlarge it",
        ),
        ("a lambda", r"^a loader process cannot send a batch \(a lambda\): data.num_workers=0"),
    ],
)
def test_a_batch_that_cannot_be_sent_is_reported(error: str, message: str) -> None:
    loader = loader_of(Refused(error), num_workers=1)
    with pytest.raises(DataError, match=message) as raised:
        list(loader.steps(microbatches(0, 40)))
    raised.value.__traceback__ = None
    del raised


def test_loader_processes_that_cannot_start_name_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = loader_of(Noisy(), num_workers=1)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(loader, "_loader", MagicMock(__iter__=Mock(side_effect=full)))
    with pytest.raises(DataError, match=r"cannot run \(.*No space left.*\): raise the limit .* enlarge /dev/shm"):
        loader.steps(microbatches(0, 40))


def test_samples_that_identify_the_data_are_read_by_a_loader_process() -> None:
    loader = loader_of(Noisy(), num_workers=1)
    assert loader.fingerprint() == loader_of(Noisy()).fingerprint() == fingerprint(Noisy())
    process = loader._loader._iterator._workers[0].pid
    next(loader.steps(microbatches(0, 40)))
    assert loader._loader._iterator._workers[0].pid == process
    loader = loader_of(Fatal("import os; os.kill(os.getpid(), 9)", sample=0), num_workers=1)
    with pytest.raises(RuntimeError, match=r"by signal 9 while reading sample 0 \(epoch 1\)") as raised:
        loader.fingerprint()
    raised.value.__traceback__ = None
    del raised


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_hangs_is_named(num_workers: int) -> None:
    data = Fatal("import time; time.sleep(3)")
    loader = loader_of(data, num_workers=num_workers, order="sequential", validation_fraction=0.0)
    batches = loader.steps(microbatches(0, 16, 4))
    next(batches)
    assert loader.reading() == ""
    found: list[str] = []
    watcher = threading.Timer(1.5, lambda: found.append(loader.reading()))
    watcher.start()
    list(batches)
    watcher.join()
    assert found == ["while reading sample 7 (epoch 1)"]


SCRIPT = """
import sys
from torch import nn
from steadfast import Config, Sums, fit
from tests.support.loading import Noisy

class Data(Noisy):
    blob = bytes(int(sys.argv[1]))  # more than a pipe holds, or nothing

    def __init__(self):
        self.held = self.blob

def loss(model, batch):
    return Sums(model(batch[0]).square().sum(), len(batch[0]))

config = Config.model_validate({
    "run": {"name": "script", "epochs": 1},
    "batch": {"global_size": 8},
    "data": {"kind": "text", "num_workers": 2, "validation_fraction": 0},
})
fit(config, model=nn.Linear(4, 1), dataset=Data(), task=loss)
"""


@pytest.mark.parametrize("num_bytes", [0, 10**6])
def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path, num_bytes: int) -> None:
    (tmp_path / "main.py").write_text(SCRIPT)
    with pytest.raises(AssertionError) as failed:
        run_program(tmp_path / "main.py", num_bytes, cwd=tmp_path)
    lines = str(failed.value).splitlines()
    (told,) = [line for line in lines if "Error" in line]
    assert "DataError: a loader process ended as it started." in told
    assert 'under `if __name__ == "__main__":`' in told
    assert len(lines) < 20


TERMINATED = """
import os
import psutil
import sys
from tests.support.loading import Noisy, loader_of, microbatches

if __name__ == "__main__":
    loader = loader_of(Noisy(), num_workers=1)
    batches = loader.steps(microbatches(0, 10**6))
    next(batches)
    mine = psutil.Process().children(recursive=True)
    for each in mine:  # by another process than theirs
        for name in ("TERM", "INT", "HUP", "USR1", "USR2"):
            os.system(f"kill -{name} {each.pid}")
    fetched = [next(batches).num_samples for _ in range(50)]
    (process,) = loader._loader._iterator._workers
    if sys.argv[1] == "worker":
        process.terminate()
        process.join(10)
    print(len(mine), fetched == [8] * 50, process.exitcode, *[each.pid for each in mine], flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize(("by", "code"), [("worker", "0"), ("its end", "None")])
def test_processes_outlive_stop_signals_and_end_with_their_worker(tmp_path: Path, by: str, code: str) -> None:
    """In a process of its own, which has no server yet."""
    (tmp_path / "main.py").write_text(TERMINATED)
    count, is_same, exitcode, *pids = run_program(tmp_path / "main.py", by).split()
    assert (count, is_same, exitcode) == ("3", "True", code)
    until_s = time.monotonic() + 30
    while living := [pid for pid in pids if psutil.pid_exists(int(pid))]:
        assert time.monotonic() < until_s, living
        time.sleep(0.1)


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
