"""The meters of a log step: the median step and the mean rates."""

from steadfast.telemetry.meters import Meters


def test_meters_give_median_step_and_mean_rates() -> None:
    meters = Meters(flops_per_sample=5e9, peak_flops_total=1e12)
    for seconds in (5.0, 1.0, 1.0, 3.0):
        meters.record(seconds, num_samples=10, units=1000, data_s=0.5)
    first = meters.snapshot(remaining_steps=6)
    rates = {"units_per_s": 400.0, "samples_per_s": 4.0, "mfu": 0.02}
    assert first == {"step_ms": 2000.0, "data_wait": 0.2, "eta_s": 12.0, **rates}
    meters.record(0.5, num_samples=10, units=1000)
    second = meters.snapshot(remaining_steps=0)
    assert second["step_ms"] == 500.0
    assert second["data_wait"] == 0.0


def test_mfu_is_unknown_without_a_peak() -> None:
    meters = Meters(flops_per_sample=5e9)
    meters.record(2.0, num_samples=10, units=10)
    assert meters.snapshot(remaining_steps=3)["mfu"] is None
