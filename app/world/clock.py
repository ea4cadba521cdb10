"""Clocks whose marks stand in the order of the work itself: on CUDA in the device's stream, as the host runs ahead."""

import time
from typing import Any

import torch


class HostClock:
    """Takes the time of what the host computes itself."""

    on_device = False

    def mark(self) -> Any:
        """Return a mark of what has been asked for so far."""
        return time.perf_counter()

    def passed(self, mark: Any) -> bool:
        """Return whether everything before the mark is done."""
        return True

    def between_s(self, first: Any, second: Any) -> float:
        """Return the seconds between two marks that have passed."""
        return float(second - first)


class DeviceClock(HostClock):
    """Takes the time of what the host launches on a CUDA device, by events in the stream. Nothing waits for them."""

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
