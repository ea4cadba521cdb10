"""Bad input gets one clear message and the right exit code, and leaves nothing half-written behind."""

from pathlib import Path

import pytest

from tests.support.command import Commands

BEFORE_RAY = {
    "a target that does not import": ("model.target=nope.mod:Net", "no module nope"),
    "a target without the attribute": ("model.target=tests.examples.digits:nope", "has no nope"),
    "storage that cannot be written": ("run.storage=/dev/null", "/dev/null/run cannot be written"),
    "batch smaller than a microbatch": ("batch.global_size=4", "must be at most batch.global_size (4), found 8"),
    "an unknown key": ("optimizer.lrr=3", "unknown key; nearest is lr"),
}


@pytest.mark.parametrize(("override", "message"), BEFORE_RAY.values(), ids=BEFORE_RAY)
def test_what_is_wrong_is_told_before_ray_starts(command: Commands, override: str, message: str) -> None:
    run = command()
    finished = run.run(override, small=False)
    assert finished.code == 2
    assert message in finished.output
    assert "Traceback" not in finished.output
    assert "Ray:" not in finished.output
    assert not run.directory.exists()


@pytest.mark.ray
def test_more_gpus_than_exist_are_named(command: Commands) -> None:
    run = command()
    finished = run.run("scaling.gpus_per_worker=1")
    assert finished.code == 2
    assert "2 workers of 1 CPU and 1 GPU each" in finished.output
    assert "0 GPUs have room for 0" in finished.output
    assert not run.directory.exists()


@pytest.mark.ray
def test_an_empty_dataset_is_bad_usage(on_head: Commands, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    run = on_head()
    finished = run.run(f"data.source={tmp_path}/empty.txt")
    assert finished.code == 2
    assert "holds 0 tokens" in finished.output
    assert "Traceback" not in finished.output
    assert not run.directory.exists()


@pytest.mark.ray
def test_an_exception_in_user_code_ends_the_run_with_its_traceback_when_it_comes_back(on_head: Commands) -> None:
    run = on_head(config="digits.yaml")
    words = ("scaling.num_workers=2", "task.target=tests.examples.ragged:FailsAtStep7")
    finished = run.run(*words, "run.steps=200", "validation.every=1000 steps", "run.report=false", small=False)
    assert finished.code == 1
    assert "ValueError: a bug in the user's loss" in finished.output
    assert "tests/examples/ragged.py" in finished.output


ERROR = "Unable to find address for: ib0"


@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.slow
def test_an_interface_that_does_not_exist_ends_the_run_with_its_error_and_what_to_do(
    command: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")  # as on the cluster that the user has come from
    words = ("run.steps=1000000", "recovery.silence_s=3")
    finished = command().run(*words, timeout_s=240)

    assert finished.code == 1, finished.output
    told, remedy = finished.output.split("workers cannot communicate, although no worker was lost: ")
    assert told.count(ERROR) == 2
    assert remedy.startswith("2 attempts in a row broke before they had finished a step\n")
    assert ERROR in remedy
    assert "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME" in remedy
    assert "NCCL_DEBUG=INFO" in remedy
    assert "Traceback" not in finished.output
