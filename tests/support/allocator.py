"""Measure what tensors take on the CPU."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(function: Callable[[], object]) -> int:
    """Call `function`, and return the most bytes that it has held at once, as the CPU's allocator counts them.

    In a process that has measured nothing before: what then stays behind would be counted as well.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    peak = 0
    results = profiled.profiler.kineto_results
    events = list(results.experimental_event_tree())
    while events:
        event = events.pop()
        events += event.children
        if event.typed[0].name == "Allocation":
            peak = max(peak, event.typed[1].total_allocated)
    return peak
