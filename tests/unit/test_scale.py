"""`scale`: each of two commands at once prints its own answer."""

from pathlib import Path

import pytest

from steadfast.run.directory import RunDirectory, ScaleRequest
from steadfast.run.events import Scale
from steadfast.run.owner import Ownership
from steadfast.storage import LocalStore
from tests.support.verbs import printed


def test_a_scale_prints_the_answer_to_its_own_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = RunDirectory.request_scale

    def request_scale(directory: RunDirectory, smallest: int, largest: int) -> str:
        """Request other bounds too, and answer both."""
        names = [honest(directory, *bounds) for bounds in ((1, 2), (smallest, largest), (1, 4))]
        for request in directory.pop_requests():
            assert isinstance(request, ScaleRequest)
            bounds = request.smallest, request.largest
            directory.record(Scale(before=(1, 1), after=bounds, request=request.name))
        return names[1]

    monkeypatch.setattr(RunDirectory, "request_scale", request_scale)
    monkeypatch.setattr("steadfast.commands.scale._ANSWER_S", 600.0)
    ownership = Ownership.claim(LocalStore(tmp_path))
    try:
        assert printed(capsys, "scale", tmp_path, "--workers", "1:3").out.endswith(": [1, 1] -> [1, 3]\n")
    finally:
        ownership.release()
