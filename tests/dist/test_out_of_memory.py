"""Memory runs out in a forward: the run goes on with smaller ones, and comes to the same result."""

from pathlib import Path

import pytest

from tests.support.claims import check_run, check_weights
from tests.support.drill import drill
from tests.support.gang import MemberFailed
from tests.support.reference import reference
from tests.support.run_directories import shrink_forwards
from tests.support.small import small

# The grid has four microbatches of up to four samples, the last of one.
WORDS = ["model.dropout=0", "batch.microbatch_size=4"]
TENSOR = "fsdp, tensor_size: 2"
GATHERED_ONCE = "fsdp, reshard_after_forward: false"  # for all parts of a microbatch
KINDS = ["ddp", "fsdp", "pipeline", pytest.param(TENSOR, marks=pytest.mark.slow)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("forward_size", [1, 3])
def test_forwards_of_any_size_give_the_steps_of_whole_microbatches(
    tmp_path: Path, kind: str, forward_size: int
) -> None:
    config = small(tmp_path, *WORDS, f"parallel={{kind: {kind}}}")
    shrink_forwards(config, forward_size)
    largest = 4 if kind in ("pipeline", TENSOR) else 3  # of whole replicas
    check_run(drill(config, worlds=[largest, 2], leave_after=[5]), reference(config))


@pytest.mark.parametrize("kind", [*KINDS, GATHERED_ONCE])
def test_where_one_rank_runs_out_all_go_on_with_less(tmp_path: Path, kind: str) -> None:
    oom = "faults.inject=[{kind: oom_at, step: 7, rank: 1, times: 2}]"
    config = small(tmp_path, *WORDS, f"parallel={{kind: {kind}}}", oom, "checkpoint.every=3 steps")
    run = drill(config, worlds=[2, 2, 2])
    assert run.told("forwards_shrunk", "forward_size") == [2, 1]
    assert run.told("forwards_shrunk", "step") == [7, 7]
    assert len({tuple(pids) for pids in run.pids()}) == 1, "nobody had to be replaced"
    check_weights(run, reference(config))
    assert sorted(run.history.committed) == list(range(1, 15))
    assert run.summary["lost_steps"] == 0 or kind != "ddp"


def test_what_does_not_fit_alone_ends_the_run_with_what_to_try(tmp_path: Path) -> None:
    oom = "faults.inject=[{kind: oom_at, step: 3, rank: 0, times: null}]"
    with pytest.raises(MemberFailed, match="a forward of one sample does not fit into memory: injected at step 3"):
        drill(small(tmp_path, *WORDS, oom), worlds=[1, 1, 1])


def test_statistics_of_a_microbatch_are_the_mean_of_its_parts(tmp_path: Path) -> None:
    words = ["batch.microbatch_size=4", "model.target=tests.support.models:Normalised", "run.steps=1"]
    plain = drill(small(tmp_path / "plain", *words), worlds=[1])
    config = small(tmp_path / "parts", *words)
    shrink_forwards(config, 2)
    parts = drill(config, worlds=[1])
    name = "norm.running_mean"
    assert (parts.weights[name] - plain.weights[name]).abs().max() <= 1e-10
    assert parts.weights["norm.num_batches_tracked"] == 4
