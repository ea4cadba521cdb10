"""What of a run stands among Ray's metrics."""

import pytest
from ray.util.metrics import Gauge

from steadfast.orchestration.gauges import Gauges
from steadfast.run.events import AttemptEnded, Event
from tests.support import events
from tests.support.events import changed

LOG = changed(events.LOG, time_s=1000.0, step_ms=100.0, mfu=None)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    values: dict[str, float] = {}

    def keep(gauge: Gauge, value: float) -> None:
        values[gauge.info["name"]] = value

    monkeypatch.setattr(Gauge, "set", keep)
    monkeypatch.setattr("steadfast.orchestration.gauges.time.time", lambda: 1000.0)
    return values


def after(*told: Event) -> None:
    gauges = Gauges("run")
    for event in told:
        gauges.observe(event)


def test_the_figures_of_a_log_line_are_shown(shown: dict[str, float]) -> None:
    after(LOG)
    assert shown == {
        "steadfast_step": 10,
        "steadfast_loss": 2.5,
        "steadfast_samples_per_s": 10.0,
        "steadfast_world_size": 2,
        "steadfast_goodput": 0.0,
    }
    # Goodput counts a step that is done again once.
    steps = [(20, 2.0), (15, 3.0), (20, 4.0), (30, 5.0)]  # with seconds since the first line
    after(LOG, *(changed(LOG, step=step, time_s=1000.0 + passed_s) for step, passed_s in steps))
    assert shown["steadfast_goodput"] == pytest.approx((1.0 + 1.0) / 5.0)
    after(LOG, AttemptEnded(cause="worker lost"))
    assert (shown["steadfast_world_size"], shown["steadfast_samples_per_s"], shown["steadfast_step"]) == (0, 0, 10)
