"""State that fsdp keeps in the host's memory, through worlds that come and go."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.claims import check_run
from tests.support.drill import Members, drill
from tests.support.patches import put_all_beyond_reach
from tests.support.reference import reference
from tests.support.small import small


@pytest.mark.parametrize(
    ("parallel", "worlds", "sources"),
    [
        ("{kind: fsdp, cpu_offload: true}", [3, 2, 4], ["snapshot", "snapshot"]),
        ("{kind: fsdp, cpu_offload: true, shard_size: 2}", [4, [2, 3], 4], ["rank 0", "rank 2"]),
    ],
)
def test_worlds_of_other_sizes_go_on_with_it(
    parallel: str, worlds: list[Members], sources: list[str], tmp_path: Path
) -> None:
    config = small(tmp_path, f"parallel={parallel}")
    run = drill(config, worlds=worlds, leave_after=[4, 4], patch=put_all_beyond_reach)
    check_run(run, reference(config))
    assert run.told("restore", "step") == [5, 10]
    assert run.told("restore", "source") == sources
