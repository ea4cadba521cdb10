"""A test that cannot fail shows nothing: the code is broken on purpose, and the checks that must notice do."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import mutations
from tests.support.claims import (
    CLAIMS,
    check_equal,
    check_identical,
    check_ledger,
    check_losses,
    check_weights,
)
from tests.support.drill import Drilled, Members, drill
from tests.support.reference import Reference, reference
from tests.support.small import small

Claim = Callable[[Drilled, Reference], None]
Mutation = Callable[[], None]

RESULT = {check_weights, check_losses}
EVERYTHING = {check_ledger, *RESULT}


@pytest.mark.parametrize(
    ("mutation", "kind", "broken"),
    [
        (mutations.nothing, "ddp", set()),
        (mutations.nothing, "fsdp", set()),
        (mutations.repeat_a_sample, "ddp", EVERYTHING),
        (mutations.swap_two_samples_across_ranks, "ddp", EVERYTHING),
        (mutations.read_another_sample_than_is_said, "ddp", RESULT),
        (mutations.drop_a_microbatch, "ddp", EVERYTHING),
        (mutations.count_pads, "fsdp", EVERYTHING),
        (mutations.key_dropout_by_rank, "ddp", RESULT),
        (mutations.take_means_before_the_sum, "ddp", RESULT),
        (mutations.broadcast_from_rank_0, "ddp", RESULT),
        (mutations.broadcast_no_optimizer, "ddp", RESULT),
        (mutations.load_no_optimizer, "fsdp", RESULT),
        (mutations.keep_gathered_weights_over_the_update, "fsdp, reshard_after_forward: false", RESULT),
        (mutations.nothing, "pipeline", set()),
        (mutations.leave_generators_as_they_are, "pipeline", RESULT),
    ],
)
def test_what_is_broken_is_noticed_by_the_claims_that_it_breaks(
    tmp_path: Path, mutation: Mutation, kind: str, broken: set[Claim]
) -> None:
    """In a run whose first leader leaves, and comes back with an old state."""
    config = small(tmp_path, f"parallel={{kind: {kind}}}")
    worlds: list[Members] = [4, [2, 3], 4] if kind == "pipeline" else [3, [1, 2], 3]
    run = drill(config, worlds=worlds, leave_after=[4, 4], patch=mutation, audited=False)
    expected = reference(config)
    assert {claim for claim in CLAIMS if not holds(claim, run, expected)} == broken


def holds(claim: Claim, run: Drilled, expected: Reference) -> bool:
    try:
        claim(run, expected)
    except AssertionError:
        return False
    return True


def test_torchs_reducer_resumes_an_identical_run_while_its_buckets_stay_as_they_are(tmp_path: Path) -> None:
    """Torch lays them out anew otherwise, and so adds gradients in another order from an attempt's second step on."""
    by_torch = "parallel.reducer=torch"
    for patch in (mutations.nothing, mutations.find_no_unused_parameters):
        undisturbed = drill(small(tmp_path / f"{patch.__name__}-undisturbed", by_torch), worlds=[3], patch=patch)
        config = small(tmp_path / f"{patch.__name__}-resumed", by_torch)
        drill(config, worlds=[3], stop_after=6, patch=patch)
        resumed = drill(config, worlds=[3], patch=patch)
        check_equal(resumed.weights, undisturbed.weights)
        if patch is mutations.nothing:
            check_identical(resumed, undisturbed)
        else:
            with pytest.raises(AssertionError):
                check_identical(resumed, undisturbed)
