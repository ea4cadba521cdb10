"""Format numbers for log lines and messages."""

import re
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.filesize import pick_unit_and_suffix

# What moves the cursor, changes a terminal's settings or reverses text; lone surrogates cannot be printed at all.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LONG_ID = re.compile("[0-9a-f]{9,}")


def printable(text: str) -> str:
    """Replace control characters, except newlines and tabs, for text that somebody else may have written."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def number(value: float) -> str:
    """Write four digits, so that the width stays the same from line to line: 2.413, 2.000."""
    return f"{value:#.4g}".rstrip(".")


def compact(value: float) -> str:
    """Write a count with a decimal suffix: 812, 39.8k, 1.2M."""
    unit, suffix = pick_unit_and_suffix(int(value), ["", "k", "M", "G", "T"], 1000)
    return f"{value / unit:.1f}{suffix}" if suffix else f"{value:.0f}"


def size(num_bytes: float) -> str:
    """Write a number of bytes with a binary suffix: 10.1 MiB."""
    unit, suffix = pick_unit_and_suffix(int(num_bytes), ["B", "KiB", "MiB", "GiB"], 1024)
    return f"{num_bytes / unit:.1f} {suffix}"


def duration(seconds: float) -> str:
    """Write a duration as precisely as an estimate can be: 45s, 53m, 3h 12m."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f}s"
    if minutes < 60:
        return f"{minutes}m"
    return f"{minutes // 60}h {minutes % 60}m"


def plural(count: float, noun: str) -> str:
    """Write a count with its noun: 1 worker, 4 workers."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def in_ranges(noun: str, numbers: Sequence[int]) -> str:
    """Write ascending numbers in a few words, with what they count: rank 2, ranks 0-3, 8."""
    parts: list[list[int]] = []
    for each in numbers:
        if parts and each == parts[-1][-1] + 1:
            parts[-1].append(each)
        else:
            parts.append([each])
    ranges = [str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts]
    return f"{noun if len(numbers) == 1 else noun + 's'} {', '.join(ranges)}"


def node_name(node: str) -> str:
    """Shorten Ray's id of a node, of whose 56 digits eight are enough to find it; a host's name stays whole."""
    return node[:8] if _LONG_ID.fullmatch(node) else node


def joined(parts: Iterable[str]) -> str:
    """Join the parts of a console line; empty parts are left out."""
    return " | ".join(part for part in parts if part)


def in_words(metrics: Mapping[str, float]) -> str:
    """Write metrics as a part of a console line: loss 2.413 | accuracy 0.5000."""
    return joined(f"{name} {number(value)}" for name, value in metrics.items())


class Wording(string.Formatter):
    """Fills in a line with fields in braces. Beside Python's format specs there are words for what a value is."""

    def format_field(self, value: Any, format_spec: str) -> str:
        match format_spec:
            case "size":
                return size(value)
            case "ms":
                return f"{1e3 * value:.0f} ms"
            case "each":
                return ", ".join(map(str, value))
            case "metrics":
                return in_words(value)
            case "step" | "worker":
                return plural(value, format_spec)
        return str(super().format_field(value, format_spec))
