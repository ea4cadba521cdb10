"""`run.exact`: the same bits for any number of workers, any shares, and whatever becomes of the workers."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import steadfast.loop.worker_state
from steadfast.checkpoint.state import sha256
from steadfast.tasks import LanguageModeling, Sums
from tests.support import mutations
from tests.support.claims import check_ledger, largest_difference
from tests.support.drill import Drilled, Members, drill
from tests.support.gang import MemberFailed
from tests.support.reference import reference
from tests.support.small import small

EXACT = "run.exact=true"


class Result(NamedTuple):
    """What must not depend on the worlds."""

    model: str
    optimizer: str
    losses: list[float | None]
    metrics: dict[str, float]


def result_of(run: Drilled) -> Result:
    losses = [line["loss"] for _, line in sorted(run.history.committed.items())]
    return Result(run.summary["model_sha256"], run.summary["optimizer_sha256"], losses, run.summary["metrics"])


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def precision(request: pytest.FixtureRequest) -> str:
    return f"precision.kind={request.param}"


@pytest.fixture(scope="module")
def alone(precision: str, tmp_path_factory: pytest.TempPathFactory) -> Drilled:
    return drill(small(tmp_path_factory.mktemp("alone"), EXACT, precision), worlds=[1])


@pytest.mark.parametrize(
    ("worlds", "leave_after", "words"),
    [
        ([2], [], ()),
        ([3], [], ("batch.balance=speed", "data.num_workers=1")),
        pytest.param([4], [], (), marks=pytest.mark.slow),
        ([4, 3, 1, 2], [3, 3, 3], ()),
        ([2, [1, 2], 3], [4, 4], ()),  # the first leader leaves, and comes back with an old state
        ([2], [], ("faults.inject=[{kind: slow_at, ranks: [1], ms: 30}]", "batch.balance=speed")),
    ],
)
def test_every_sequence_of_worlds_gives_the_bits_of_one_worker(
    tmp_path: Path, alone: Drilled, precision: str, worlds: Sequence[Members], leave_after: list[int], words: Any
) -> None:
    run = drill(small(tmp_path, EXACT, precision, *words), worlds=worlds, leave_after=leave_after)
    assert result_of(run) == result_of(alone)


def test_a_run_stopped_and_resumed_by_others_has_the_same_bits(tmp_path: Path, alone: Drilled, precision: str) -> None:
    config = small(tmp_path, EXACT, precision)
    drill(config, worlds=[3], stop_after=6)
    assert result_of(drill(config, worlds=[2])) == result_of(alone)


def test_the_result_is_that_of_one_process_with_plain_sums_but_for_the_unit(tmp_path: Path) -> None:
    """A sum is off by up to 2^-38 of the largest element, also in fp64, and AdamW divides small ones by themselves."""
    config = small(tmp_path, EXACT)
    run, expected = drill(config, worlds=[3, 2], leave_after=[5]), reference(config)
    check_ledger(run, expected)
    assert largest_difference(run.weights, expected.weights) < 1e-6
    assert [line["loss"] for line in run.history.lines] == pytest.approx(expected.losses, abs=1e-7)


def test_in_32_bits_it_is_as_near_to_the_true_result_as_an_ordinary_run(tmp_path: Path) -> None:
    expected = reference(small(tmp_path / "reference")).weights
    ordinary = drill(small(tmp_path / "ordinary", "precision.kind=fp32"), worlds=[2])
    exact = drill(small(tmp_path / "exact", EXACT, "precision.kind=fp32"), worlds=[2])
    # AdamW divides small gradients by themselves, so the difference of a single weight is another on each processor.
    assert mean_difference(exact.weights, expected) <= 2 * mean_difference(ordinary.weights, expected)
    assert result_of(exact) != result_of(ordinary)


def mean_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    differences = [(found[name].double() - expected[name].double()).abs().flatten() for name in expected]
    return float(torch.cat(differences).mean())


def runs(
    storage: Path,
    schedules: Sequence[Sequence[Members]],
    *words: str,
    leave_after: Sequence[int] = (),
    patch: Callable[[], None] | None = None,
) -> list[Drilled]:
    """Return an exact run in 32 bits for each schedule of worlds."""
    found = []
    for number, worlds in enumerate(schedules):
        config = small(storage / str(number), EXACT, "precision.kind=fp32", *words)
        found.append(drill(config, worlds=worlds, leave_after=leave_after[: len(worlds) - 1], patch=patch))
    return found


def are_alike(found: Sequence[Drilled]) -> bool:
    results = [result_of(run) for run in found]
    return all(result == results[0] for result in results)


def test_a_step_that_is_left_out_changes_no_bit_of_the_others(tmp_path: Path) -> None:
    """Nor does it matter where the run goes back to."""
    bad = "faults.inject=[{kind: nan_at, step: 7, rank: 0}]"
    found = runs(tmp_path / "one", [[1, 1]], bad, "checkpoint.every=2 steps")
    found += runs(tmp_path / "other", [[3, 2]], bad, "checkpoint.every=3 steps")
    for run in found:
        assert [line["step"] for line in run.history.committed.values() if line.get("skipped")] == [7]
    assert are_alike(found)


class Huge(LanguageModeling):
    """A loss whose gradients have elements above 2^16."""

    def loss(self, model: nn.Module, batch: Any) -> Sums:
        sums = super().loss(model, batch)
        return Sums(sums.loss_sum * 2.0**30, sums.count)


def test_gradients_that_do_not_fit_are_left_out_alike_and_then_fit(tmp_path: Path) -> None:
    found = runs(tmp_path, [[1], [3], [3, 2]], "task.target=tests.dist.test_exact:Huge", leave_after=[1])
    for run in found:
        assert [line["step"] for line in run.history.lines if line.get("overflow")] == [1]
    assert are_alike(found)


def test_parts_of_microbatches_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    """Where memory has run out; the result is then another than with whole ones, and still that of any world."""
    oom = "faults.inject=[{kind: oom_at, step: 3, rank: 0, times: 1}]"
    found = runs(tmp_path, [[1, 1], [3, 2]], oom, "checkpoint.every=1 steps")
    assert [run.told("forwards_shrunk", "forward_size") for run in found] == [[1], [1]]
    assert are_alike(found)


# Products and norms so large that torch divides them among threads.
WIDE = (
    "batch={global_size: 8, microbatch_size: 2}",
    "model={kind: gpt, num_layers: 2, num_heads: 2, embed_dim: 128, context_length: 6, vocab_size: 19, dropout: 0.1}",
    "run.steps=4",
)


@pytest.mark.parametrize(
    ("mutation", "words"),
    [
        (mutations.nothing, ()),
        (mutations.add_gradients_as_floats, ()),
        (mutations.add_losses_as_floats, ("precision.kind=fp64",)),  # of fp32 float64 adds up a few without rounding
        (mutations.take_the_unit_from_the_world, ()),
    ],
)
def test_what_is_broken_shows_in_the_bits(tmp_path: Path, mutation: Callable[[], None], words: tuple[str, ...]) -> None:
    assert are_alike(runs(tmp_path, [[1], [2], [3]], *words, patch=mutation)) == (mutation is mutations.nothing)


@pytest.mark.parametrize("patch", [mutations.begin_with_threads, mutations.leave_the_number_of_threads])
def test_the_number_of_threads_is_not_the_environments(tmp_path: Path, patch: Callable[[int], None]) -> None:
    one, two = runs(tmp_path / "one", [[1], [2]], *WIDE, patch=partial(patch, 1))
    (four,) = runs(tmp_path / "four", [[1]], *WIDE, patch=partial(patch, 4))
    assert are_alike([one, two])
    assert are_alike([one, four]) == (patch is mutations.begin_with_threads)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("Codebook", "run.exact: a forward changes the model's buffer codes"),
        ("Normalised", "its layer norm keeps running statistics"),
    ],
)
def test_models_of_which_a_part_follows_from_the_world_are_refused(tmp_path: Path, model: str, message: str) -> None:
    with pytest.raises(MemberFailed, match=message):
        drill(small(tmp_path, EXACT, f"model.target=tests.support.models:{model}"), worlds=[2])


def other_hardware_on_one_rank() -> None:
    steadfast.loop.worker_state.kind_of = lambda device: f"model {dist.get_rank() % 2}"  # type: ignore[attr-defined]


def test_hardware_that_rounds_differently_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MemberFailed, match="rank 1 computes on model 1, rank 0 on model 0"):
        drill(small(tmp_path, EXACT), worlds=[2], patch=other_hardware_on_one_rank)


def test_checkpoints_hold_the_unit_only_in_exact_runs(tmp_path: Path) -> None:
    ordinary = small(tmp_path, "precision.kind=fp32")
    first = drill(ordinary, worlds=[2], stop_after=5)
    assert first.summary["model_sha256"] == sha256(first.weights)
    exact = small(tmp_path, "precision.kind=fp32", EXACT)  # a run may turn it on, and off again
    assert drill(exact, worlds=[2], stop_after=4).summary["step"] > first.summary["step"]
    assert drill(ordinary, worlds=[2]).summary["step"] == 14
