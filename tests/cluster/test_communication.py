"""Workers that live and cannot reach each other: the run says why, and ends."""

from __future__ import annotations

import pytest

from tests.support.command import Commands

pytestmark = pytest.mark.ray

ERROR = "Unable to find address for: ib0"


@pytest.mark.parametrize("mode", ["slots", pytest.param("restart", marks=pytest.mark.slow)])
@pytest.mark.timeout(300)
@pytest.mark.slow
def test_an_interface_that_does_not_exist_ends_the_run_with_its_error_and_what_to_do(
    command: Commands, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")  # as on the cluster that the user has come from
    words = ("run.steps=1000000", f"recovery.mode={mode}", "recovery.silence_s=3")
    finished = command().run(*words, timeout_s=240)

    assert finished.code == 1, finished.output
    told, remedy = finished.output.split("workers cannot communicate, although no worker was lost: ")
    assert told.count(ERROR) == 2
    assert remedy.startswith("2 attempts in a row broke before they had finished a step\n")
    assert ERROR in remedy
    assert "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME" in remedy
    assert "NCCL_DEBUG=INFO" in remedy
    assert "Traceback" not in finished.output
