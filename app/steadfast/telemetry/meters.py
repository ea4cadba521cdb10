"""Times and rates of the steps since the last log line."""

from statistics import median
from typing import TypedDict

import torch


class Figures(TypedDict):
    """Times and rates since the last log line.

    The names are those of the fields of the event `log`.
    """

    step_ms: float
    data_wait: float
    units_per_s: float
    samples_per_s: float
    mfu: float | None
    eta_s: float


class GpuFigures(TypedDict, total=False):
    """Figures of a GPU, none where the driver's library NVML cannot be used.

    The names are those of the fields of the event `log`.
    """

    gpu_utilization: float
    gpu_memory_bytes: int
    gpu_power_w: float


class GpuMeter:
    """Reads utilization, memory and power of a GPU from NVML, through the package nvidia-ml-py."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_off = device.type != "cuda"

    def read(self) -> GpuFigures:
        """Return the current figures. The first call loads NVML."""
        if self._is_off:
            return {}
        try:
            return {
                "gpu_utilization": torch.cuda.utilization(self._device) / 100,
                "gpu_memory_bytes": torch.cuda.device_memory_used(self._device),
                "gpu_power_w": torch.cuda.power_draw(self._device) / 1000,
            }
        # The package or the library may be missing, and some virtual GPUs answer no questions. The errors have no
        # common class.
        except Exception:
            self._is_off = True
            return {}


class Meters:
    """Averages the steps between two log lines.

    Each attempt has its own meters, so no figure mixes two worlds.
    """

    def __init__(self, flops_per_sample: float | None = None, peak_flops_total: float | None = None) -> None:
        self._flops_per_sample = flops_per_sample  # of forward and backward
        self._peak_flops_total = peak_flops_total  # FLOP/s of all workers together
        self._begin()

    def _begin(self) -> None:
        self._seconds: list[float] = []  # duration of each step since the last log line
        self._data_s = 0.0
        self._num_samples = 0
        self._num_units = 0

    def record(self, step_seconds: float, num_samples: int, units: int, data_s: float = 0.0) -> None:
        """Add one step.

        Args:
            step_seconds: duration of the step.
            num_samples: samples of the whole global batch.
            units: tokens, or samples, of the whole global batch.
            data_s: part of `step_seconds` in which this rank waited for batches.
        """
        self._seconds.append(step_seconds)
        self._data_s += data_s
        self._num_samples += num_samples
        self._num_units += units

    def snapshot(self, remaining_steps: int) -> Figures:
        """Return the figures since the last call, and start a new window.

        At least one step must have been recorded since then.
        """
        total_s = sum(self._seconds)
        # Rates are means, because a pause slows down the run. The step time is a median, because a pause should not
        # change it.
        samples_per_s = self._num_samples / total_s
        units_per_s = self._num_units / total_s
        step_s = median(self._seconds)
        data_wait = self._data_s / total_s
        # As in PaLM (arXiv:2204.02311, appendix B): recomputation is not counted, since it trains nothing.
        mfu = None
        if self._flops_per_sample and self._peak_flops_total:
            mfu = samples_per_s * self._flops_per_sample / self._peak_flops_total
        self._begin()
        return {
            "step_ms": step_s * 1e3,
            "data_wait": data_wait,
            "units_per_s": units_per_s,
            "samples_per_s": samples_per_s,
            "mfu": mfu,
            "eta_s": remaining_steps * step_s,
        }
