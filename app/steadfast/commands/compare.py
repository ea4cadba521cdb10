"""`compare RUN_A RUN_B`: compare two runs, and show the first difference."""

import math
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from steadfast.commands.options import add_run_argument, run_on_cluster, take_storage
from steadfast.errors import UsageError
from steadfast.run.directory import RunDirectory, find_run, reading
from steadfast.storage.documents import json_line
from steadfast.units import in_ranges, node_name, plural, printable

if TYPE_CHECKING:
    from steadfast.analysis.compare import Comparison, Difference, Ran

Rows = dict[str, str]


def add_arguments(parser: ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON")


def run(options: Namespace) -> int:
    """Print the comparison. Return 1 if the runs differ, else 0."""
    take_storage(options)
    if len(options.runs) != 2:
        raise UsageError("compare takes two runs, for example: compare ddp other")
    if options.cluster:
        return run_on_cluster(options)
    from steadfast.analysis.compare import compare

    one = find_run(options.runs[0], options.storage)
    other = find_run(options.runs[1], options.storage)
    with reading(one):
        found = compare(one, other)
    if options.json:
        print(json_line({"runs": [one.uri, other.uri], **found.to_line()}))
    else:
        print(printable(_page(one, other, found)))
    return int(found.first is not None)


def _page(one: RunDirectory, other: RunDirectory, found: "Comparison") -> str:
    lines = [f"A: {one.uri}", f"B: {other.uri}"]
    identity = _changed(found, identity=True)
    if identity:
        lines += ["their configurations make them different runs:", *identity]
    if found.first is None:
        lines.append("no difference found in the compared values")
    else:
        lines.append(f"they differ, first at step {found.first.step}: {_in_words(found.first)}")
        for name, ran in zip("AB", found.first.ran, strict=True):
            lines.append(f"  {name}: {_ran(ran)}")
    for name, row in _rows(found).items():
        lines.append(f"{name:<9} {row}")
    # Other keys can only explain a difference, so they are listed only if there is one.
    other_keys = _changed(found, identity=False)
    if found.first is not None and other_keys:
        lines += ["other differences of the configurations:", *other_keys]
    return "\n".join(lines)


def _changed(found: "Comparison", identity: bool) -> list[str]:
    """Return a line for each differing key.

    Args:
        identity: whether to list the keys that a resume refuses to change, or the keys that it accepts.
    """
    lines = []
    for change in found.changes:
        if change.identity == identity:
            lines.append(f"  {change.key}: {change.old} and {change.new}")
    return lines


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
        nodes = []
        for node, ranks in ran.nodes.items():
            nodes.append(f"node {node_name(node)} ({in_ranges('rank', ranks)})")
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
    same, different = [], []
    for name, (ours, theirs) in found.ends.items():
        if ours == theirs:
            same.append(name)
        else:
            different.append(name)
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
