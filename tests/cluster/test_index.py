"""`index` writes the rows of Ray Data, in order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from tests.support.command import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def rows() -> Any:
    from ray import data

    return data.range(5000, override_num_blocks=20).map(lambda row: {"id": row["id"], "square": row["id"] ** 2})


@pytest.mark.timeout(180)
def test_rows_of_ray_data_become_shards(tmp_path: Path) -> None:
    (tmp_path / "stream.yaml").write_text('data: {target: "tests.cluster.test_index:rows"}\n')
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "app")])}
    words = [sys.executable, "-m", "steadfast", "index", "--config", "stream.yaml", "--out", "shards"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    found = parquet.read_table(tmp_path / "shards")
    assert found.column("id").to_pylist() == list(range(5000))
    assert found.column("square").to_pylist()[-1] == 4999**2
