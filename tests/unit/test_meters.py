"""The meters of a log step: the median step and the mean rates."""

import pytest
import torch

from steadfast.telemetry.meters import GpuMeter, Meters


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
    unknown = Meters(flops_per_sample=5e9)  # without a peak
    unknown.record(2.0, num_samples=10, units=10)
    assert unknown.snapshot(remaining_steps=3)["mfu"] is None


CUDA = torch.device("cuda:0")


def test_a_gpu_is_read_in_units_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.utilization", lambda _: 93)
    monkeypatch.setattr("torch.cuda.device_memory_used", lambda _: 5 * 2**30)
    monkeypatch.setattr("torch.cuda.power_draw", lambda _: 412_000)
    expected = {"gpu_utilization": 0.93, "gpu_memory_bytes": 5 * 2**30, "gpu_power_w": 412.0}
    assert GpuMeter(CUDA).read() == expected


def test_without_nvml_or_gpu_there_are_no_figures_and_no_further_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def missing(device: object) -> int:
        asked.append(device)
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed or it can't be imported.")

    monkeypatch.setattr("torch.cuda.utilization", missing)
    meter = GpuMeter(CUDA)
    assert [meter.read(), meter.read(), GpuMeter(torch.device("cpu")).read()] == [{}, {}, {}]
    assert asked == [CUDA]
