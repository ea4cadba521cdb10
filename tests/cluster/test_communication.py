"""Workers that live and cannot reach each other: the run says why, and ends."""

from __future__ import annotations

import pytest

from tests.command import Commands

pytestmark = pytest.mark.ray

ERROR = "Unable to find address for: ib0"


@pytest.mark.parametrize("mode", ["slots", "restart"])
@pytest.mark.timeout(180)
def test_an_interface_that_does_not_exist_ends_the_run_with_its_error_and_what_to_do(
    command: Commands, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")  # as on the cluster that the user has come from
    running = command().start("run.steps=1000000", f"recovery.mode={mode}", "recovery.silence_s=3")
    finished = running.wait()

    assert finished.code == 1, finished.output
    told, remedy = finished.output.split("workers cannot communicate, though none was lost: ")
    assert told.count(ERROR) == 2
    assert remedy.startswith("2 attempts in a row broke before they had finished a step\n")
    assert ERROR in remedy
    assert "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME" in remedy
    assert "NCCL_DEBUG=INFO" in remedy
    assert "Traceback" not in finished.output
    failures = [event for event in running.events if event["event"] == "failure"]
    charged = [event["fatal"] for event in failures if event["kind"] == "communication"]
    assert charged == [False, False, True]
