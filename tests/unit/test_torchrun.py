"""How torchrun's ranks begin: by a command of the user's, or once more by one that has the run already; and an end."""

from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from steadfast.config import parse_config
from steadfast.errors import RunConflict, UsageError
from steadfast.guards.numerics import BadStep
from steadfast.launch import torchrun
from steadfast.launch.detect import under_torchrun
from steadfast.launch.torchrun import Beginning, Place, TorchrunRuntime, _begun, unused_keys
from steadfast.plan import Amendments
from steadfast.run.directory import RunDirectory
from steadfast.run.events import Failure, Notice, RunStarted
from steadfast.run.owner import Ownership
from steadfast.storage import LocalStore
from steadfast.world.groups import PeerLost
from steadfast.world.report import ProgressReport
from steadfast.world.runtime import Outcome
from steadfast.world.timeouts import Timeouts
from tests.support.history import write_ledger


@pytest.mark.parametrize(
    ("command_s", "again"),
    [(100.0, True), (140.0, True), (151.0, None)],
    ids=["restarted at once", "a node that came later leads now", "given after the last step"],
)
def test_a_command_that_was_there_before_the_last_step_has_begun_again(
    command_s: float, again: bool | None, tmp_path: Path
) -> None:
    directory = RunDirectory(LocalStore(tmp_path))
    assert _begun(directory, 103.0, 100.0) == RunStarted(time_s=100.0, launcher="torchrun")
    directory.record(_begun(directory, 103.0, 100.0))
    # Even where it has not come to a step: the first beginning is the command's own time.
    assert _begun(directory, 110.0, 100.0) == RunStarted(time_s=110.0, launcher="torchrun", again=True)
    write_ledger(directory.store, [{"step": 1, "attempt": 1, "time_s": 150.0}])
    begun = _begun(directory, 153.0, command_s)
    assert begun == RunStarted(time_s=153.0 if again else command_s, launcher="torchrun", again=again)


def runtime_of(directory: RunDirectory, ownership: Ownership | None = None, **place: int) -> TorchrunRuntime:
    beginning = Beginning(1, Amendments(), ownership)
    return TorchrunRuntime(Place(torch.device("cpu"), Mock(), **place), Timeouts(), directory, Mock(), beginning)


def test_a_signal_or_a_command_that_takes_the_run_over_stops_a_rank(tmp_path: Path) -> None:
    directory = RunDirectory(LocalStore(tmp_path))
    ownership = Ownership.claim(directory.store)
    with closing(runtime_of(directory, ownership=ownership)) as runtime:
        assert not runtime.signals().stop
        runtime.request_stop("SIGTERM to pid 7 on h")
        assert runtime.signals().stop
        assert runtime.signals().stop
        ownership.lost = "another command has taken over: on elsewhere, pid 1"
        with pytest.raises(RunConflict, match="on elsewhere, pid 1"):
            runtime.signals()
    (notice,) = directory.events(Notice)
    assert notice.text == "SIGTERM to pid 7 on h: the run stops after this step"


@pytest.mark.parametrize(("outcome", "code"), [(Outcome("finished", 9), 0), (Outcome("stopped", 5), 3), (None, 3)])
def test_torchruns_rank_ends_with_three_when_its_run_was_stopped(
    monkeypatch: pytest.MonkeyPatch, outcome: Outcome | None, code: int
) -> None:
    monkeypatch.setattr(torchrun, "start_worker", lambda config, runtime: Mock() if outcome else None)
    monkeypatch.setattr(torchrun, "train_in_worlds", lambda runtime, worker, directory: outcome)
    assert torchrun._train(Mock(), Mock(), Mock()).exit_code == code


@pytest.mark.parametrize(
    ("error", "rank"),
    [(ValueError("a bug"), 1), (PeerLost("connection closed"), 1), (BadStep((7,), "loss is NaN"), None)],
)
def test_a_failure_names_the_rank_unless_all_ranks_raise_it(tmp_path: Path, error: Exception, rank: int | None) -> None:
    directory = RunDirectory(LocalStore(tmp_path))
    with closing(runtime_of(directory, rank=1, world_size=2)) as runtime, pytest.raises(type(error)):
        runtime.failed(6, error)
    (failure,) = directory.events(Failure)
    assert (failure.rank, failure.step, failure.fatal) == (rank, 6, True)


@pytest.mark.parametrize(
    ("words", "world_size", "expected"),
    [
        ([], 3, []),
        (["scaling.num_workers=2"], 2, []),
        (["scaling.num_workers=2"], 1, ["scaling.num_workers (torchrun starts the workers, here 1)"]),
        (
            ["cluster.address=local", "recovery={hang_limit_s: 9, silence_s: 9}"],
            1,
            ["cluster.address", "recovery.hang_limit_s"],
        ),
        (["scaling={spares: 1, cpus_per_worker: 2}"], 2, ["scaling.spares", "scaling.cpus_per_worker"]),
        (["scaling.cpus_per_worker=2", "run.exact=true"], 2, []),
        (["run.exact=true", "recompute.every=5 steps"], 1, ["recompute.every (it needs a second worker)"]),
    ],
)
def test_keys_that_have_no_effect_without_ray_are_named(words: list[str], world_size: int, expected: list[str]) -> None:
    assert unused_keys(parse_config("", overrides=words), world_size) == expected


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {"LOCAL_RANK": None, "MASTER_PORT": None},
            "RANK, WORLD_SIZE, MASTER_ADDR set without LOCAL_RANK, MASTER_PORT",
        ),
        ({"RANK": "1"}, "RANK=1 with WORLD_SIZE=1: ranks go from 0 to WORLD_SIZE - 1"),
        ({"RANK": "-1"}, "RANK=-1: must be a number"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE=: must be a number"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT=x: must be a number"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536: ports go up to 65535"),
        ({}, None),
    ],
)
def test_an_environment_of_torchruns_that_no_world_can_have_is_refused(
    variables: dict[str, str | None], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {**environment, **variables}.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    if said is None:
        assert under_torchrun()
    else:
        with pytest.raises(UsageError, match=f"^{said}.*unset them to train under Ray"):
            under_torchrun()


@pytest.mark.parametrize(
    ("limit_s", "last_s", "num_lines"), [(3.0, 31.0, 1), (3.0, 29.0, 0), (60.0, 31.0, 0), (None, 99.0, 0)]
)
def test_torchrun_reports_once_that_a_rank_waits_for_a_silent_host(
    limit_s: float | None, last_s: float, num_lines: int, tmp_path: Path
) -> None:
    runtime = runtime_of(RunDirectory(LocalStore(tmp_path)))
    reports = [
        ProgressReport(1, 0, [4, -1, 2, 0, 1], 7, "gradients", seconds, limit_s, {})
        for seconds in (2.0, last_s, last_s)
    ]
    runtime._process = Mock(progress=Mock(report=Mock(side_effect=reports)))
    runtime._closed = Mock(wait=Mock(side_effect=[False, False, False, True]))
    runtime._watch(Timeouts())
    lines = [call.args[0] for call in runtime._console.line.call_args_list]  # type: ignore[attr-defined]
    assert len(lines) == num_lines
    assert all("waited for 31 s after step 7 (gradients)" in line and "30 min" in line for line in lines)
    runtime.close()
