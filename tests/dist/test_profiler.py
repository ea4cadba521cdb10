"""Traces of steps, by the ranks and the steps that the configuration names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.claims import check_run
from tests.support.drill import drill
from tests.support.reference import reference
from tests.support.small import small


def test_a_profile_is_a_trace_for_perfetto_and_a_table_and_changes_nothing(tmp_path: Path) -> None:
    profile = "profile={wait: 2, warmup: 1, active: 2, repeat: 2, ranks: [1], shapes: true}"
    config = small(tmp_path, profile)
    run = drill(config, worlds=[2])
    check_run(run, reference(config))
    assert run.told("profile", "rank") == [1, 1]
    assert run.told("profile", "step") == [5, 10]
    for path, table in zip(run.told("profile", "path"), run.told("profile", "table"), strict=True):
        trace = json.loads(Path(path).read_text())
        steps = [each["name"] for each in trace["traceEvents"] if each.get("name", "").startswith("ProfilerStep")]
        assert len(set(steps)) == 2
        assert any("Input Dims" in each.get("args", {}) for each in trace["traceEvents"])
        assert Path(path.replace(".pt.trace.json", ".txt")).read_text() == table
        assert "aten::" in table
    assert len(list((tmp_path / "small" / "profile").iterdir())) == 4


@pytest.mark.parametrize("profile", ["{}", "{active: 2, ranks: [7]}", "{active: 2, wait: 12}"])
def test_where_nothing_is_to_be_recorded_or_a_recording_is_not_complete_nothing_is_written(
    tmp_path: Path, profile: str
) -> None:
    drill(small(tmp_path, f"profile={profile}"), worlds=[1])
    assert not (tmp_path / "small" / "profile").exists()
