"""Clocks for work on the host or in a CUDA stream.

On CUDA the host runs ahead, so a mark has to be part of the stream.
"""

import time
from typing import Any

import torch


class HostClock:
    """Measures the time of the host's own work."""

    on_device = False

    def mark(self) -> Any:
        """Return a mark after all work requested so far."""
        return time.perf_counter()

    def passed(self, mark: Any) -> bool:
        """Return whether all work before the mark is done."""
        return True

    def between_s(self, first: Any, second: Any) -> float:
        """Return the seconds between two marks that have passed."""
        return float(second - first)


class DeviceClock(HostClock):
    """Measures work on a CUDA device by events, without waiting."""

    on_device = True

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def between_s(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second)) / 1e3


def build_clock(device: torch.device) -> HostClock:
    """Return the clock of the device."""
    return DeviceClock() if device.type == "cuda" else HostClock()
