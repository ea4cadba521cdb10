"""Format numbers for log lines and messages."""

import re
import time
from collections.abc import Iterable, Mapping, Sequence

from rich.filesize import pick_unit_and_suffix

# Characters that move the cursor, change a terminal's settings or reverse text. Lone surrogates cannot be printed.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LONG_ID = re.compile("[0-9a-f]{9,}")


def printable(text: str) -> str:
    """Replace control characters, except newlines and tabs."""
    # The text may come from another user, who could otherwise send commands to the terminal.
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def number(value: float) -> str:
    """Format a number with four digits: 2.413, 2.000."""
    # The format `#` keeps trailing zeros, so that columns of log lines stay below each other. It also leaves a point
    # after a number of four digits.
    return f"{value:#.4g}".rstrip(".")


def compact(value: float) -> str:
    """Format a count with a decimal suffix: 812, 39.8k, 1.2M."""
    unit, suffix = pick_unit_and_suffix(int(value), ["", "k", "M", "G", "T"], 1000)
    if not suffix:
        return f"{value:.0f}"
    return f"{value / unit:.1f}{suffix}"


def size(num_bytes: float) -> str:
    """Format a number of bytes with a binary suffix: 10.1 MiB."""
    unit, suffix = pick_unit_and_suffix(int(num_bytes), ["B", "KiB", "MiB", "GiB"], 1024)
    return f"{num_bytes / unit:.1f} {suffix}"


def duration(seconds: float) -> str:
    """Format an estimated duration: 45s, 53m, 3h 12m."""
    minutes = round(seconds / 60)
    # Seconds matter only while the estimate is short.
    if minutes < 2:
        return f"{seconds:.0f}s"
    if minutes < 60:
        return f"{minutes}m"
    return f"{minutes // 60}h {minutes % 60}m"


def clock(time_s: float | None) -> str:
    """Format a Unix time as the time of day; return "" for None."""
    if time_s is None:
        return ""
    return time.strftime("%H:%M:%S", time.localtime(time_s))


def plural(count: float, noun: str) -> str:
    """Format a count with its noun: 1 worker, 4 workers."""
    if count == 1:
        return f"{count} {noun}"
    return f"{count} {noun}s"


def in_ranges(noun: str, numbers: Sequence[int]) -> str:
    """Format ascending numbers as ranges: rank 2, ranks 0-3, 8."""
    parts: list[list[int]] = []
    for each in numbers:
        if parts and each == parts[-1][-1] + 1:
            parts[-1].append(each)
        else:
            parts.append([each])
    ranges: list[str] = []
    for part in parts:
        if len(part) == 1:
            ranges.append(str(part[0]))
        else:
            ranges.append(f"{part[0]}-{part[-1]}")
    if len(numbers) != 1:
        noun += "s"
    return f"{noun} {', '.join(ranges)}"


def node_name(node: str) -> str:
    """Shorten Ray's id of a node, and return a host's name whole."""
    # Eight of the id's 56 digits are enough to identify a node.
    return node[:8] if _LONG_ID.fullmatch(node) else node


def joined(parts: Iterable[str]) -> str:
    """Join the parts of a console line, without empty parts."""
    return " | ".join(filter(None, parts))


def in_words(metrics: Mapping[str, float]) -> str:
    """Format metrics for a console line: loss 2.413 | accuracy 0.5000."""
    return joined(f"{name} {number(value)}" for name, value in metrics.items())
