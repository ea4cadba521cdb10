"""`parallel.kind: data_parallel`, as far as it goes without a GPU: there the model is the plain one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from steadfast.config import DataParallelConfig
from steadfast.errors import UsageError
from steadfast.parallel import build_parallel
from tests.support.claims import check_run
from tests.support.drill import drill
from tests.support.reference import reference
from tests.support.small import small


def test_one_worker_trains_as_one_process_does_and_is_told_of_ddp(tmp_path: Path) -> None:
    config = small(tmp_path, "parallel.kind=data_parallel", "scaling.num_workers=1")
    run = drill(config, worlds=[1])
    check_run(run, reference(config))
    (notice,) = run.told("notice", "text")
    assert notice.startswith("parallel.kind=data_parallel copies the model to each GPU in every forward")


def test_a_second_worker_is_refused() -> None:
    world: Any = SimpleNamespace(size=2)
    with pytest.raises(UsageError, match="data_parallel is one process, and there are 2: use ddp"):
        build_parallel(DataParallelConfig(), world, SimpleNamespace(device=torch.device("cpu")))  # type: ignore[arg-type]
