"""`status [RUN] [--watch]`: show the status of one run or of all runs.

The verb works on any machine that sees the run directories.
"""

import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from steadfast.commands.options import add_run_argument, run_on_cluster, take_storage
from steadfast.errors import StorageError, UsageError
from steadfast.run.directory import RunDirectory, find_run, reading
from steadfast.run.owner import read_owner
from steadfast.storage.documents import json_line
from steadfast.units import compact, duration, in_ranges, in_words, joined, node_name, number, plural, printable, size

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from steadfast.analysis.status import Node, Status
    from steadfast.telemetry.interruptions import Interruption

_EVERY_S = 1.0
_NUM_INTERRUPTIONS = 8  # number of newest interruptions on the page; --json has all of them


def add_arguments(parser: ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument("--watch", action="store_true", help="refresh the page every second, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print JSON for scripts: one object, or a list of all runs")


def run(options: Namespace) -> int:
    """Print the status of a run, or a line for each run."""
    take_storage(options)
    if len(options.runs) > 1 or (options.watch and options.json):
        raise UsageError("status takes one run or none, and --watch or --json: status ddp --watch")
    if options.cluster:
        return run_on_cluster(options)
    show = _one(options.runs[0], options.storage) if options.runs else _all(options.storage)
    if options.json:
        print(json_line(show(True)))
    elif options.watch:
        _watch(lambda: show(False))
    else:
        _print(show(False))
    return 0


def _one(name: str, storage: str) -> Callable[[bool], object]:
    from steadfast.analysis.status import StatusReader

    # One reader serves all refreshes of --watch, because it keeps the goodput between two readings of the ledger.
    reader = StatusReader(find_run(name, storage))

    def show(as_json: bool) -> object:
        with reading(reader.directory):
            status = reader.read()
        if as_json:
            return status.to_json()
        return page(status)

    return show


def _all(storage: str) -> Callable[[bool], object]:
    from steadfast.analysis.status import StatusReader

    place = RunDirectory.at(storage)  # parent of all run directories

    def show(as_json: bool) -> object:
        statuses: list[Status] = []
        unreadable: dict[str, str] = {}  # reason by URI
        with reading(place):
            names = place.store.list("")
        for name in names:
            directory = RunDirectory.at(place / name)
            # An unreadable run, such as a damaged or private one of another user, must not hide the other runs.
            try:
                with reading(directory):
                    if read_owner(directory.store):  # a folder without an owner is no run
                        statuses.append(StatusReader(directory).read(brief=True))
            except StorageError as error:
                unreadable[directory.uri] = str(error)
        if not statuses and not unreadable:
            raise UsageError(f"no run below {place.uri}; choose another place with --storage")
        if not as_json:
            return overview(statuses, unreadable)
        found = [status.to_json() for status in statuses]
        for uri, why in unreadable.items():
            found.append({"uri": uri, "state": "unreadable", "error": why})
        return found

    return show


def _watch(show: Callable[[], object]) -> None:
    from rich.console import Console
    from rich.live import Live

    # The alternate screen keeps the content of the terminal, which is shown again afterwards. `auto_refresh` would
    # redraw the same page from a thread, four times a second.
    with Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live:
        while True:
            live.update(show(), refresh=True)  # type: ignore[arg-type]
            time.sleep(_EVERY_S)


def _print(page: object) -> None:
    from rich.console import Console

    # Rich would otherwise colour every number and path of the page.
    Console(highlight=False).print(page)


def overview(statuses: list["Status"], unreadable: Mapping[str, str]) -> "RenderableType":
    """Return a table with a line for each run.

    The run that finished a step last comes first.

    Args:
        statuses: the status of each readable run.
        unreadable: messages for unreadable runs by URI. Their lines come last.
    """
    from rich.console import Group
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("run", "state", "step", "train\nloss", "validation\nloss", "rate", "workers", "where"):
        # A number that goes on in the next line would be misread. Names may be longer than the terminal is wide.
        table.add_column(heading, no_wrap=heading not in ("run", "where"), overflow="fold")
    for status in sorted(statuses, key=lambda status: status.step_age_s or 0.0):
        table.add_row(*map(_text, _cells(status)))
    return Group(table, *map(_text, unreadable.values()))


def _cells(status: "Status") -> tuple[str, ...]:
    """Return the cells of a run's line."""
    loss = validation_loss = rate = workers = where = ""
    if status.log:
        loss = number(status.log.loss)
        # Rate and workers are shown for running runs only, because they describe the present.
        if status.state == "running":
            rate = f"{compact(status.log.units_per_s)} {status.log.unit}/s"
            workers = str(status.log.world_size)
    held_out = (status.metrics or {}).get("loss")
    if held_out is not None:
        validation_loss = number(held_out)
    if status.host:
        where = f"{status.host} {status.pid}"
    name = status.uri.rpartition("/")[2]
    return name, status.state, _progress(status), loss, validation_loss, rate, workers, where


def _text(content: str) -> "Text":
    """Return a text of a run with markup and control characters disabled."""
    from rich.text import Text

    return Text(printable(content))


def page(status: "Status") -> "RenderableType":
    """Return the page with the full status of one run."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _lines(status):
        if text:
            table.add_row(name, _text(text))
    return table


def _lines(status: "Status") -> Iterator[tuple[str, str]]:
    yield "run", status.uri
    yield "state", _state(status)
    yield "progress", _progress_in_words(status)
    yield from _figures(status)
    yield "validation", in_words(status.metrics or {})
    yield "checkpoint", _checkpoint(status)
    yield "at risk", _at_risk(status)
    if status.goodput:
        found = status.goodput
        stalled = f"stalled {duration(found['stall_s'])}"
        yield "goodput", joined([f"{found['goodput']:.1%} of {duration(found['wall_s'])}", stalled])
    yield "interrupted", "\n".join(_interruptions(status))
    yield "events", "\n".join(f"{_clock(event.time_s)} {event.line()}" for event in status.latest)


def _state(status: "Status") -> str:
    state = status.state
    if status.host:
        state += f" on {status.host}, pid {status.pid}"
    heard = ""
    if status.state == "silent" and status.heard_s is not None:
        heard = f"no sign of life for {duration(status.heard_s)}; the same command takes the run over"
    elif status.state == "killed":
        heard = "the command ended without a report; the same command resumes the run"
    return joined([state, f"attempt {status.attempt}", heard])


def _progress(status: "Status") -> str:
    # Only log lines have the length of the run.
    if status.log is None:
        return str(status.step)
    return f"{status.step}/{status.log.total_steps}"


def _progress_in_words(status: "Status") -> str:
    log = status.log
    if log is None:
        return f"step {status.step}"
    parts = [f"step {_progress(status)} {100 * status.step // max(1, log.total_steps)}%"]
    if status.step_age_s is not None:
        parts.append(f"last step {duration(status.step_age_s)} ago")
    if status.state == "running":
        parts.append(f"eta {duration(log.eta_s)}")
    return joined(parts)


def _figures(status: "Status") -> Iterator[tuple[str, str]]:
    log = status.log
    if log is None:
        return
    loss = f"loss {number(log.loss)} at step {log.step}"
    yield "training", joined([loss, in_words(log.metrics), f"gradient norm {number(log.grad_norm)}"])
    speed = [f"{compact(log.units_per_s)} {log.unit}/s", f"{log.step_ms:.0f} ms a step"]
    # The mfu is unknown for a model without a count of its operations, or on a device with an unknown peak.
    if log.mfu:
        speed.append(f"mfu {log.mfu:.1%}")
    yield "speed", joined(speed)
    yield "data wait", f"{log.data_wait:.0%}"
    yield "memory", f"{size(log.memory_bytes)}, peak on the leader"
    world = [plural(log.world_size, "worker")]
    if status.nodes:
        world.append(plural(len(status.nodes), "node"))
    yield "world", joined(world)
    yield "nodes", "\n".join(map(_node, status.nodes))


def _node(node: "Node") -> str:
    """Return the line of a node: its ranks, GPUs and own times."""
    ranks = in_ranges("rank", node.ranks)
    gpus = []
    for gpu, count in Counter(node.gpus).items():
        gpus.append(f"{count} x {gpu}")
    speed = last = ""
    if node.own_ms:
        # The texts are compared, because times that look the same are no range for a reader.
        times, slowest = number(min(node.own_ms)), number(max(node.own_ms))
        if times != slowest:
            times = f"{times} to {slowest}"
        speed = f"own time {times} ms a step"
        if len(node.ranks) > 1:
            speed = f"own times {times} ms a step"
        # Only the rank that the others wait for most often is named: a node may have many ranks.
        share, rank = max(zip(node.last, node.ranks, strict=True))
        last = f"rank {rank} is last in {share:.0%} of the checks"
    return joined([f"{node_name(node.node)} {ranks}", ", ".join(gpus), speed, last])


def _checkpoint(status: "Status") -> str:
    newest = status.checkpoint
    if newest is None:
        return "none yet"
    step = f"step {newest.step}"
    if newest.time_s:
        step += f", {duration(time.time() - newest.time_s)} ago"
    return f"{step} | {size(newest.bytes)} in {newest.seconds:.1f} s | {newest.path}"


def _at_risk(status: "Status") -> str:
    # A run that does not train has no steps to lose.
    if status.log is None or status.state not in ("running", "starting"):
        return ""
    losses = []
    for name, steps in status.log.at_risk.items():
        losses.append(f"{name.replace('_', ' ')} {steps}")
    if not losses:
        return ""
    return f"steps to redo after the loss of: {', '.join(losses)}"


def _interruptions(status: "Status") -> list[str]:
    lines = list(map(_interruption, status.interruptions[-_NUM_INTERRUPTIONS:]))
    if len(status.interruptions) > _NUM_INTERRUPTIONS:
        lines.insert(0, f"... {len(status.interruptions) - _NUM_INTERRUPTIONS} earlier interruptions")
    return lines


def _interruption(each: "Interruption") -> str:
    cause = f"{_clock(each.time_s)} {each.cause or each.kind}"
    if each.back_s is None or each.workers is None:
        return f"{cause} | not back yet"
    before, after = each.workers
    workers = f"{before} -> {after} workers" if before != after else plural(after, "worker")
    parts = [cause, workers]
    # Only failures have to be detected: a resize is planned.
    if each.detected_s is not None:
        parts.append(f"detected in {each.detected_s:.1f} s")
    parts.append(f"back in {each.back_s:.1f} s")
    if each.lost_steps:
        parts.append(f"{plural(each.lost_steps, 'step')} lost")
    return joined(parts)


def _clock(time_s: float | None) -> str:
    if time_s is None:
        return ""
    # The date is left out for events of today.
    today = time.strftime("%Y-%m-%d", time.localtime())
    day, clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s)).split()
    return clock if day == today else f"{day} {clock}"
