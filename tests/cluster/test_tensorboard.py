"""What TensorBoard itself shows of a run whose leader was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command import STANDALONE, Commands
from tests.support.curves import check_curve, kill_rank

NUM_STEPS = 150
FIGURES = {"train/loss": "loss", "train/grad_norm": "grad_norm", "train/lr": "lr"}


def curves(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the points of each tag, as TensorBoard's own reader has them."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(directory / "tensorboard"), size_guidance={reader.SCALARS: 0})
    events.Reload()
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_a_run_that_is_killed_and_restarted_has_one_curve_a_tag(command: Commands) -> None:
    run = command(launcher=[*STANDALONE, "--max-restarts", "1"])
    slow = "faults.inject=[{kind: slow_at, ranks: [0, 1], ms: 30}]"
    running = run.start(f"run.steps={NUM_STEPS}", "logging.every_steps=1", "checkpoint.every=1000 steps", slow)
    running.wait_for_step(70)
    kill_rank(running, 0)
    finished = running.wait()
    assert finished.code == 0, finished.output

    found = curves(run.directory)
    assert FIGURES.keys() | {"speed/step_ms"} < found.keys()
    for tag, points in found.items():
        steps = [step for step, _ in points]
        assert steps == sorted(set(steps)), f"{tag}: {steps}"
    for tag, figure in FIGURES.items():
        check_curve(run.directory, dict(found[tag]), NUM_STEPS, figure)
    assert [value for _, value in found["events/failures"]] == [0.0, 1.0]
