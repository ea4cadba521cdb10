"""The table of a run of drills, and what its results come to."""

from collections.abc import Mapping, Sequence

from tests.gpu.runner import PASSES, Result

ALL_PASSED, FAILED, BAD_USAGE, NOTHING_CHECKED, SOME_SKIPPED = range(5)


def exit_code(results: Sequence[Result]) -> int:
    """Return the exit code: 0 if all passed or were rehearsed, 1 if any failed.

    3 if nothing was checked, 4 if none failed but some were skipped.
    """
    states = {result.state for result in results}
    if "FAILED" in states:
        return FAILED
    if not states & set(PASSES):
        return NOTHING_CHECKED
    return SOME_SKIPPED if "SKIPPED" in states else ALL_PASSED


def table(results: Sequence[Result], machine: Mapping[str, str], device: str) -> str:
    """Return the results as a markdown table, under a line that says where and when they came to be."""
    where = " · ".join(f"{name} {value}" for name, value in machine.items())
    rehearsal = (
        "" if device == "cuda" else "**Rehearsal without a GPU: it shows that the drills run, nothing else.**\n\n"
    )
    counts = []
    for state in ("PASSED" if device == "cuda" else "REHEARSED", "FAILED", "SKIPPED"):
        counts.append(f"{sum(each.state == state for each in results)} {state}")
    rows = ["| drill | state | s | figures | reason |", "|---|---|---|---|---|"]
    for each in results:
        figures = ", ".join(f"{name} {_plain(value)}" for name, value in each.figures.items())
        rows.append(f"| {each.name} | {each.state} | {each.seconds:.0f} | {_cell(figures)} | {_cell(each.reason)} |")
    return f"{rehearsal}{where}\n\n" + "\n".join(rows) + f"\n\n{', '.join(counts)}\n"


def _plain(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    one_line = " ".join(text.split()).replace("|", "\\|")
    return one_line if len(one_line) <= 600 else one_line[:597] + "..."
