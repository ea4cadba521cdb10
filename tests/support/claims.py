"""What every run must satisfy. The honest tests call these; the mutations show that each of them can fail."""

import pytest
from torch import Tensor

from steadfast.checkpoint.state import sha256
from tests.support.drill import Drilled
from tests.support.reference import Reference

EQUAL = 1e-10  # the design's bound for `equal`: float64, at most a hundred steps


def check_ledger(run: Drilled, expected: Reference) -> None:
    """Claim: every step is committed once, with every sample of its global batch and no other, each at its place."""
    lines = run.history.lines
    assert [line["step"] for line in lines] == list(range(1, len(expected.losses) + 1))
    assert [line["num_samples"] for line in lines] == expected.num_samples
    assert [line["samples_digest"] for line in lines] == [f"{digest:016x}" for digest in expected.digests]


def check_weights(run: Drilled, expected: Reference) -> None:
    """Claim: the weights are those of one process that does the whole global batch."""
    check_equal(run.weights, expected.weights)


def check_losses(run: Drilled, expected: Reference) -> None:
    """Claim: the losses that are reported are means over the global batch, and over all samples that are held out."""
    assert [line["loss"] for line in run.history.lines] == pytest.approx(expected.losses, abs=EQUAL)
    assert run.summary["metrics"]["loss"] == pytest.approx(expected.validation_loss, abs=EQUAL)


def check_checkpoint(run: Drilled, expected: Reference | None = None) -> None:
    """Claim: the last checkpoint is the state that the run ended with, whichever workers wrote which part of it."""
    for part, state in (("model", run.weights), ("optimizer", run.optimizer)):
        expected_hash = sha256(state) if state else None  # an optimizer may have nothing to hold
        assert run.summary.get(f"{part}_sha256") == expected_hash, f"the checkpoint holds another {part} state"


CLAIMS = (check_ledger, check_weights, check_losses, check_checkpoint)


def check_run(run: Drilled, expected: Reference) -> None:
    """Every claim that a finished run must satisfy, whatever worlds it went through."""
    for check in CLAIMS:
        check(run, expected)


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Claim: the same, but for the order of floating point sums."""
    difference = largest_difference(found, expected)
    assert difference <= EQUAL, f"they differ by {difference:.3g}"  # NaN does not pass either


def check_identical(found: Drilled, expected: Drilled) -> None:
    """Claim: the same sequence of worlds gives the same bits."""
    for part in ("model_sha256", "optimizer_sha256"):
        assert found.summary[part] == expected.summary[part]


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name].double() - expected[name].double()).abs().max()) for name in expected)
