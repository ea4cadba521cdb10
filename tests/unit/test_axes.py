"""The layout of a world follows from the number of workers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadfast.config import Config
from steadfast.config.axes import Layout, layout_of_most
from tests.support.small import small


def config_of(parallel: str, *words: str) -> Config:
    batch = "batch={global_size: 64, microbatch_size: 1}"
    return small("runs", batch, "model.attention_dropout=0", "model.num_heads=4", f"parallel={parallel}", *words)


@pytest.mark.parametrize(
    ("parallel", "layouts"),
    [
        ("{kind: ddp}", {1: "1", 7: "7"}),
        ("{kind: fsdp}", {1: "1", 7: "1 x 7", 8: "1 x 8"}),
        ("{kind: fsdp, shard_size: 4}", {3: "0", 7: "1 x 4", 8: "2 x 4"}),
        # One of 2 x 8 is lost.
        ("{kind: fsdp, shard_size: [8, 5]}", {16: "2 x 8", 15: "3 x 5", 14: "2 x 5", 7: "1 x 5"}),
        ("{kind: fsdp, shard_size: auto}", {1: "1", 2: "1 x 2", 7: "1 x 7", 8: "4 x 2", 9: "3 x 3", 15: "5 x 3"}),
        ("{kind: fsdp, shard_size: auto, tensor_size: 2}", {7: "1 x 3 x 2", 8: "2 x 2 x 2"}),
        ("{kind: fsdp, tensor_size: [2, 4]}", {7: "1 x 3 x 2", 8: "1 x 4 x 2"}),
        ("{kind: pipeline, stages: [3, 2]}", {4: "2 x 2", 5: "2 x 2", 3: "1 x 3", 6: "3 x 2", 9: "3 x 3"}),
    ],
)
def test_layout_trains_on_most_workers(parallel: str, layouts: dict[int, str]) -> None:
    config = config_of(parallel).parallel
    assert {number: str(config.layout(number)) for number in layouts} == layouts


@given(st.integers(1, 40), st.lists(st.builds(Layout, st.just(1), *[st.integers(1, 4)] * 3), min_size=1, max_size=5))
def test_no_other_layout_uses_more_workers(num_workers: int, replicas: list[Layout]) -> None:
    found = layout_of_most(num_workers, replicas)
    most = max(num_workers // replica.replica_size * replica.replica_size for replica in replicas)
    assert found.size == most <= num_workers


def test_a_world_has_whole_replicas_and_a_microbatch_for_each_worker() -> None:
    config = config_of("{kind: fsdp, shard_size: [4, 7]}", "scaling.num_workers=[4, 16]")
    assert config.world_sizes((4, 16)) == [4, 7, 8, 12, 14, 16]
    assert config.world_sizes((4, 16), num_microbatches=8) == [4, 7, 8]
