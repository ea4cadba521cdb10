"""`compare RUN RUN ...`: show how runs differ in configuration, results and cost.

Two runs are also compared step by step, and the first difference is shown.
"""

import json
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadfast.commands.options import add_run_argument, run_on_cluster, take_storage
from steadfast.errors import UsageError
from steadfast.run.directory import RunDirectory, find_run, reading
from steadfast.storage.documents import json_line
from steadfast.units import duration, in_ranges, node_name, number, plural, printable

if TYPE_CHECKING:
    from steadfast.analysis.compare import Comparison, Difference, Ran
    from steadfast.analysis.side_by_side import Outcome

Rows = dict[str, str]


def add_arguments(parser: ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument("--html", metavar="FILE", help="also write a page with the losses of all runs in one chart")
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON")


def run(options: Namespace) -> int:
    """Print the comparison. Return 1 if two runs differ in their steps or in their last step, else 0."""
    take_storage(options)
    if len(options.runs) < 2:
        raise UsageError("compare takes two runs or more, for example: compare ddp other")
    if options.cluster and options.html:
        raise UsageError(
            f"--html {options.html} would be written on the head, where --cluster runs the command: leave --html out, "
            "or leave --cluster out and give --storage PLACE, where this machine finds the runs"
        )
    if options.cluster:
        return run_on_cluster(options)
    from steadfast.analysis.compare import compare, config_of
    from steadfast.analysis.side_by_side import Outcome, differing_keys

    runs = [find_run(name, options.storage) for name in options.runs]
    found = None
    outcomes, configs = [], []
    if len(runs) == 2:
        with reading(runs[0]):
            found = compare(*runs)
    for each in runs:
        with reading(each):
            outcomes.append(Outcome.read(each))
            configs.append(config_of(each))
    keys = differing_keys(configs)
    if options.html:
        _write_html(options.html, runs, _table(outcomes, keys))
    if options.json:
        print(json_line(_document(outcomes, keys, found)))
    else:
        _print(runs, found, _table(outcomes, keys))
    return int(found is not None and not found.same)


def _document(outcomes: Sequence["Outcome"], keys: dict[str, list[Any]], found: "Comparison | None") -> dict[str, Any]:
    """Return the result for scripts. The verdict on the steps is there for two runs only."""
    table = [{"key": key, "values": values} for key, values in keys.items()]
    document = {
        "runs": [each.uri for each in outcomes],
        "outcomes": [each.to_line() for each in outcomes],
        "keys": table,
    }
    if found is not None:
        document |= found.to_line()
    return document


def _print(runs: Sequence[RunDirectory], found: "Comparison | None", table: dict[str, list[str]]) -> None:
    from steadfast.analysis.tables import print_page, table_of

    names = _names(runs)
    if found is not None:
        print(printable(_page(runs[0], runs[1], found)))
        print()
        names = [f"{letter}: {name}" for letter, name in zip("AB", names, strict=True)]
    rows = [[heading, *cells] for heading, cells in table.items()]
    print_page(table_of(["", *names], rows))


def _names(runs: Sequence[RunDirectory]) -> list[str]:
    """Return a name for each run: its own, or its location where two runs share a name."""
    names = [each.name for each in runs]
    if len(set(names)) < len(names):
        names = [each.uri for each in runs]
    return names


def _table(outcomes: Sequence["Outcome"], keys: dict[str, list[Any]]) -> dict[str, list[str]]:
    """Return the cells of all runs by the heading of their row."""
    table = {key: list(map(_in_json, values)) for key, values in keys.items()}
    metrics = dict.fromkeys(name for each in outcomes for name in each.metrics)
    table["state"] = [each.state for each in outcomes]
    table["steps"] = [str(each.step) for each in outcomes]
    table["training loss"] = [_figure(each.loss) for each in outcomes]
    for name in metrics:
        table[f"validation {name}"] = [_figure(each.metrics.get(name)) for each in outcomes]
    table["wall time"] = [duration(each.wall_s) for each in outcomes]
    table["worker-seconds"] = [f"{each.worker_s:,.0f}" for each in outcomes]
    table["interruptions"] = [_interruptions(each) for each in outcomes]
    table["steps lost"] = [str(each.lost_steps) for each in outcomes]
    return table


def _in_json(value: Any) -> str:
    # Strings are shown without quotes, as in config.yaml.
    return value if isinstance(value, str) else json.dumps(value)


def _figure(value: float | None) -> str:
    return "" if value is None else number(value)


def _interruptions(outcome: "Outcome") -> str:
    if not outcome.interruptions:
        return "0"
    return ", ".join(plural(count, kind) for kind, count in outcome.interruptions.items())


def _write_html(file: str, runs: Sequence[RunDirectory], table: dict[str, list[str]]) -> None:
    # Bokeh takes long to import.
    from steadfast.analysis.report.comparison import comparison_of
    from steadfast.analysis.report.course import Course

    courses = {}
    for name, each in zip(_names(runs), runs, strict=True):
        with reading(each):
            courses[name] = Course.read(each)
    try:
        Path(file).write_text(comparison_of(courses, table), "utf-8")
    except OSError as error:
        raise UsageError(f"--html {file} cannot be written: {error.strerror or error}") from error


def _page(one: RunDirectory, other: RunDirectory, found: "Comparison") -> str:
    lines = [f"A: {one.uri}", f"B: {other.uri}"]
    identity = [change.key for change in found.changes if change.identity]
    if identity:
        lines.append(f"their configurations make them different runs: {', '.join(identity)}")
    if found.same:
        lines.append("no difference found in the compared values")
    elif found.first is None:
        last_a, last_b = found.last_steps
        lines.append(f"different last steps, A {last_a} and B {last_b}; up to there no difference was found")
    else:
        lines.append(f"they differ, first at step {found.first.step}: {_in_words(found.first)}")
        for name, ran in zip("AB", found.first.ran, strict=True):
            lines.append(f"  {name}: {_ran(ran)}")
    for name, row in _rows(found).items():
        lines.append(f"{name:<9} {row}")
    return "\n".join(lines)


def _in_words(first: "Difference") -> str:
    return "; ".join(_value(name, *both) for name, both in first.values.items())


def _value(name: str, ours: Any, theirs: Any) -> str:
    from steadfast.analysis.compare import relative_difference

    # The first three values are flags. They differ, so they are set for exactly one of the runs.
    having, lacking = "A", "B"
    if not ours:
        having, lacking = "B", "A"
    match name:
        case "line":
            return f"{lacking} has no line for this step"
        case "skipped":
            return f"left out only in {having}"
        case "overflow":
            return f"gradients overflowed only in {having}"
        case "num_samples":
            return f"{ours} and {theirs} samples"
        case "samples_digest":
            return f"different samples, with digests {ours} and {theirs}"
        case "loss":
            relative = relative_difference(ours, theirs)
            # Beside a loss that is NaN or infinite there is no relative difference.
            if not math.isfinite(relative):
                return f"loss {ours} and {theirs}"
            return f"loss {ours} and {theirs} (relative {relative:.1e})"
        case "weights":
            return f"different weights after this step, with digests {ours} and {theirs}"
    # All other names are digests of the final states.
    return f"{name} at the end, {ours} and {theirs}"


def _ran(ran: "Ran | None") -> str:
    if ran is None:
        return "no record of this step"
    parts = []
    if ran.world_size is not None:
        parts.append(plural(ran.world_size, "worker"))
    if ran.shares is not None:
        parts.append("with " + ", ".join(map(str, ran.shares)) + " microbatches")
    if ran.nodes:
        nodes = [f"node {node_name(node)} ({in_ranges('rank', ranks)})" for node, ranks in ran.nodes.items()]
        parts.append("on " + ", ".join(nodes))
    if not parts:
        return f"attempt {ran.attempt}"
    return f"attempt {ran.attempt}: {' '.join(parts)}"


def _rows(found: "Comparison") -> Rows:
    last_a, last_b = found.last_steps
    rows = {"steps": f"{found.steps} compared, with their samples; A has reached step {last_a}, B step {last_b}"}
    rows["losses"] = f"{found.losses} compared"
    if found.unconfirmed:
        rows["losses"] += f"; {plural(found.unconfirmed, 'step')} unconfirmed"
    if found.rounded:
        largest = f"{found.largest_rounding:.1e}"
        rows["rounding"] = (
            f"loss differs by rounding in {plural(found.rounded, 'step')} (relative, at most {largest}), first at "
            f"step {found.rounded_since}"
        )
    # From this step on losses may differ by rounding, because other workers sum in another order.
    if found.shared_otherwise is not None:
        rows["workers"] = f"different workers or shares, first at step {found.shared_otherwise}"
    rows["weights"] = _weights(found)
    if found.ends:
        rows["ends"] = _ends(found)
    return rows


def _ends(found: "Comparison") -> str:
    same = [name for name, (ours, theirs) in found.ends.items() if ours == theirs]
    different = [name for name in found.ends if name not in same]
    parts = []
    if same:
        parts.append(f"the same {', '.join(same)}")
    if different:
        parts.append(f"different {', '.join(different)}")
    return "; ".join(parts)


def _weights(found: "Comparison") -> str:
    if not found.weights:
        remedy = 'logging.weights_digest_every="100 steps" records digests'
        return f"not compared: no step has a digest of the weights in both runs; {remedy}"
    compared = f"{plural(found.weights, 'digest')} compared"
    if found.weights_differ is None:
        return f"{compared}, all the same, the last after step {found.weights_same}"
    same = "never the same"
    if found.weights_same is not None:
        same = f"the same up to step {found.weights_same}"
    return f"{compared}: {same}, different since step {found.weights_differ}"
