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

    one, other = (find_run(name, options.storage) for name in options.runs)
    with reading(one):
        found = compare(one, other)
    if options.json:
        print(json_line({"runs": [one.uri, other.uri], **found.to_line()}))
    else:
        print(printable(_page(one, other, found)))
    return 0 if found.first is None else 1


def _page(one: RunDirectory, other: RunDirectory, found: "Comparison") -> str:
    lines = [f"A: {one.uri}", f"B: {other.uri}"]
    identity = [change for change in found.changes if change.identity]
    if identity:
        lines.append("their configurations make them different runs:")
        lines += [f"  {change.key}: {change.old} and {change.new}" for change in identity]
    if found.first is None:
        lines.append("no difference found in the compared values")
    else:
        lines.append(f"they differ, first at step {found.first.step}: {_in_words(found.first)}")
        lines += _who(found.first)
    lines += [f"{name:<9} {row}" for name, row in _rows(found).items()]
    # Other keys can only explain a difference, so they are listed only if there is one.
    other_keys = [change for change in found.changes if not change.identity]
    if found.first is not None and other_keys:
        lines.append("other differences of the configurations:")
        lines += [f"  {change.key}: {change.old} and {change.new}" for change in other_keys]
    return "\n".join(lines)


def _in_words(first: "Difference") -> str:
    return "; ".join(_value(name, *both) for name, both in first.values.items())


def _value(name: str, ours: Any, theirs: Any) -> str:
    from steadfast.analysis.compare import relative_difference

    match name:
        case "line":
            return f"{'B' if ours else 'A'} has no line for this step"
        case "skipped":
            return f"left out only in {'A' if ours else 'B'}"
        case "overflow":
            return f"gradients overflowed only in {'A' if ours else 'B'}"
        case "num_samples":
            return f"{ours} and {theirs} samples"
        case "samples_digest":
            return f"different samples, with digests {ours} and {theirs}"
        case "loss":
            relative = relative_difference(ours, theirs)
            return f"loss {ours} and {theirs}" + (f" (relative {relative:.1e})" if math.isfinite(relative) else "")
        case "weights":
            return f"different weights after this step, with digests {ours} and {theirs}"
    return f"{name} at the end, {ours} and {theirs}"


def _who(first: "Difference") -> list[str]:
    return [f"  {name}: {_ran(ran)}" for name, ran in zip("AB", first.ran, strict=True)]


def _ran(ran: "Ran | None") -> str:
    if ran is None:
        return "no record of this step"
    parts = [f"attempt {ran.attempt}"]
    if ran.world_size is not None:
        parts.append(plural(ran.world_size, "worker"))
    if ran.shares is not None:
        parts.append("with " + ", ".join(map(str, ran.shares)) + " microbatches")
    if ran.nodes:
        nodes = [f"node {node_name(node)} ({in_ranges('rank', ranks)})" for node, ranks in ran.nodes.items()]
        parts.append("on " + ", ".join(nodes))
    return " ".join([parts[0] + (":" if len(parts) > 1 else ""), *parts[1:]])


def _rows(found: "Comparison") -> Rows:
    last_a, last_b = found.last_steps
    rows = {"steps": f"{found.steps} compared, with their samples; A has reached step {last_a}, B step {last_b}"}
    unknown = f"; {plural(found.unconfirmed, 'step')} unconfirmed" if found.unconfirmed else ""
    rows["losses"] = f"{found.losses} compared{unknown}"
    if found.rounded:
        largest = f"{found.largest_rounding:.1e}"
        rows["rounding"] = (
            f"loss differs by rounding in {plural(found.rounded, 'step')} (relative, at most {largest}), first at "
            f"step {found.rounded_since}"
        )
    if found.shared_otherwise is not None:
        rows["workers"] = f"different workers or shares, first at step {found.shared_otherwise}"
    rows["weights"] = _weights(found)
    if found.ends:
        same = [name for name, (ours, theirs) in found.ends.items() if ours == theirs]
        others = [name for name in found.ends if name not in same]
        parts = [f"the same {', '.join(same)}" if same else "", f"different {', '.join(others)}" if others else ""]
        rows["ends"] = "; ".join(part for part in parts if part)
    return rows


def _weights(found: "Comparison") -> str:
    if not found.weights:
        remedy = 'logging.weights_digest_every="100 steps" records digests'
        return f"not compared: no step has a digest of the weights in both runs; {remedy}"
    compared = f"{plural(found.weights, 'digest')} compared"
    if found.weights_differ is None:
        return f"{compared}, all the same, the last after step {found.weights_same}"
    same = "never the same" if found.weights_same is None else f"the same up to step {found.weights_same}"
    return f"{compared}: {same}, different since step {found.weights_differ}"
