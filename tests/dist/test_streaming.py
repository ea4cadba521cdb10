"""Shards of MosaicML's Streaming, by a port of one's own: every sample is used once over changes of the world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from steadfast.config import TargetData
from steadfast.data import build_dataset
from steadfast.data.batches import Batch
from steadfast.tasks import LanguageModeling, Sums
from tests.support.claims import check_equal, check_ledger
from tests.support.drill import drill
from tests.support.reference import expected_ledger
from tests.support.small import CONTEXT, VOCABULARY, small


class NextToken(LanguageModeling):
    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        assert batch["name"][0].startswith("sample ")
        return super().loss(model, (batch["tokens"][:, :-1], batch["tokens"][:, 1:]))


def write_shards(folder: Path) -> str:
    """Write 61 samples to shards of a few each."""
    import tests.examples.operators  # noqa: F401 - before torchvision, which Streaming imports

    streaming = pytest.importorskip("streaming", reason="needs MosaicML Streaming, which `make` installs")
    rng = np.random.default_rng(1)
    with streaming.MDSWriter(
        out=str(folder), columns={"tokens": "ndarray:int64", "name": "str"}, size_limit=1000
    ) as writer:
        for index in range(61):
            writer.write({"tokens": rng.integers(VOCABULARY, size=CONTEXT + 1), "name": f"sample {index}"})
    assert len(list(folder.glob("shard.*.mds"))) > 3
    return str(folder)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of files that Streaming leaves to be closed
def test_shards_are_read_whole_and_once_over_changes_of_the_world(tmp_path: Path) -> None:
    local = write_shards(tmp_path / "shards")
    dataset: Any = build_dataset(TargetData(target="tests.examples.streaming:Shards", args={"local": local}))
    assert [dataset[index]["name"] for index in range(61)] == [f"sample {index}" for index in range(61)]
    words = [
        "data.target=tests.examples.streaming:Shards",
        f"data.args={{local: {local}}}",
        "task.target=tests.dist.test_streaming:NextToken",
        "run.epochs=3",
    ]
    config = small(tmp_path / "changing", *words)
    run = drill(config, worlds=[2, 1, 2], leave_after=[4, 4])
    check_ledger(run, expected_ledger(config))
    check_equal(run.weights, drill(small(tmp_path / "alone", *words), worlds=[1]).weights)
