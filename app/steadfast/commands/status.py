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

    from steadfast.analysis.status import Node, Status, StatusReader
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

    reader = StatusReader(find_run(name, storage))

    def show(as_json: bool) -> object:
        status = _read(reader)
        return status.to_json() if as_json else page(status)

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
        spoilt = [{"uri": uri, "state": "unreadable", "error": why} for uri, why in unreadable.items()]
        return [status.to_json() for status in statuses] + spoilt

    return show


def _read(reader: "StatusReader") -> "Status":
    with reading(reader.directory):
        return reader.read()


def _watch(show: Callable[[], object]) -> None:
    from rich.console import Console
    from rich.live import Live

    # The alternate screen keeps the content of the terminal, which is shown again afterwards.
    with Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live:
        while True:
            live.update(show(), refresh=True)  # type: ignore[arg-type]
            time.sleep(_EVERY_S)


def _print(page: object) -> None:
    from rich.console import Console

    Console(highlight=False).print(page)


def overview(statuses: list["Status"], unreadable: Mapping[str, str]) -> "RenderableType":
    """Return a table with a line for each run.

    The run with the newest step comes first.

    Args:
        statuses: the status of each readable run.
        unreadable: messages for unreadable runs by URI. Their lines come last.
    """
    from rich.console import Group
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("run", "state", "step", "train\nloss", "validation\nloss", "rate", "workers", "where"):
        table.add_column(heading, no_wrap=heading not in ("run", "where"), overflow="fold")
    for status in sorted(statuses, key=lambda status: status.step_age_s or 0.0):
        log = status.log
        # Rate and workers are shown for running runs only, because they describe the present.
        live = log if status.state == "running" else None
        cells = (
            status.uri.rpartition("/")[2],
            status.state,
            _progress(status),
            number(log.loss) if log else "",
            _validation_loss(status),
            f"{compact(live.units_per_s)} {live.unit}/s" if live else "",
            str(live.world_size) if live else "",
            f"{status.host} {status.pid}" if status.host else "",
        )
        table.add_row(*map(_text, cells))
    return Group(table, *map(_text, unreadable.values()))


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
    where = f"on {status.host}, pid {status.pid}" if status.host else ""
    heard = ""
    if status.state == "silent" and status.heard_s is not None:
        heard = f"no sign of life for {duration(status.heard_s)}; the same command takes the run over"
    elif status.state == "killed":
        heard = "the command ended without a report; the same command resumes the run"
    return joined([f"{status.state} {where}".strip(), f"attempt {status.attempt}", heard])


def _validation_loss(status: "Status") -> str:
    loss = (status.metrics or {}).get("loss")
    return "" if loss is None else number(loss)


def _progress(status: "Status") -> str:
    return f"{status.step}/{status.log.total_steps}" if status.log else str(status.step)


def _progress_in_words(status: "Status") -> str:
    log = status.log
    if log is None:
        return f"step {status.step}"
    left = f"eta {duration(log.eta_s)}" if status.state == "running" else ""
    age = f"last step {duration(status.step_age_s)} ago" if status.step_age_s is not None else ""
    return joined([f"step {_progress(status)} {100 * status.step // max(1, log.total_steps)}%", age, left])


def _figures(status: "Status") -> Iterator[tuple[str, str]]:
    log = status.log
    if log is None:
        return
    loss = f"loss {number(log.loss)} at step {log.step}"
    yield "training", joined([loss, in_words(log.metrics), f"gradient norm {number(log.grad_norm)}"])
    rate = f"{compact(log.units_per_s)} {log.unit}/s"
    yield "speed", joined([rate, f"{log.step_ms:.0f} ms a step", f"mfu {log.mfu:.1%}" if log.mfu else ""])
    yield "data wait", f"{log.data_wait:.0%}"
    yield "memory", f"{size(log.memory_bytes)}, peak on the leader"
    nodes = plural(len(status.nodes), "node") if status.nodes else ""
    yield "world", joined([plural(log.world_size, "worker"), nodes])
    yield "nodes", "\n".join(_node(node) for node in status.nodes)


def _node(node: "Node") -> str:
    """Return the line of a node: its ranks, GPUs and own times."""
    ranks = in_ranges("rank", node.ranks)
    gpus = ", ".join(f"{count} x {gpu}" for gpu, count in Counter(node.gpus).items())
    speed = last = ""
    if node.own_ms:
        fastest, slowest = number(min(node.own_ms)), number(max(node.own_ms))
        times = fastest if fastest == slowest else f"{fastest} to {slowest}"
        speed = f"own times {times} ms a step" if len(node.ranks) > 1 else f"own time {times} ms a step"
        # Only the rank that the others wait for most often is named: a node may have many ranks.
        share, rank = max(zip(node.last, node.ranks, strict=True))
        last = f"rank {rank} is last in {share:.0%} of the checks"
    return joined([f"{node_name(node.node)} {ranks}", gpus, speed, last])


def _checkpoint(status: "Status") -> str:
    newest = status.checkpoint
    if newest is None:
        return "none yet"
    age = f", {duration(time.time() - newest.time_s)} ago" if newest.time_s else ""
    return f"step {newest.step}{age} | {size(newest.bytes)} in {newest.seconds:.1f} s | {newest.path}"


def _at_risk(status: "Status") -> str:
    if status.log is None or status.state not in ("running", "starting"):
        return ""
    losses = [f"{name.replace('_', ' ')} {steps}" for name, steps in status.log.at_risk.items()]
    return f"steps to redo after the loss of: {', '.join(losses)}" if losses else ""


def _interruptions(status: "Status") -> list[str]:
    lines = [_interruption(each) for each in status.interruptions[-_NUM_INTERRUPTIONS:]]
    if len(status.interruptions) > _NUM_INTERRUPTIONS:
        lines.insert(0, f"... {len(status.interruptions) - _NUM_INTERRUPTIONS} earlier interruptions")
    return lines


def _interruption(each: "Interruption") -> str:
    cause = f"{_clock(each.time_s)} {each.cause or each.kind}"
    if each.back_s is None or each.workers is None:
        return f"{cause} | not back yet"
    before, after = each.workers
    workers = f"{before} -> {after} workers" if before != after else plural(after, "worker")
    detected = f"detected in {each.detected_s:.1f} s" if each.detected_s is not None else ""
    lost = f"{plural(each.lost_steps, 'step')} lost" if each.lost_steps else ""
    return joined([cause, workers, detected, f"back in {each.back_s:.1f} s", lost])


def _clock(time_s: float | None) -> str:
    if time_s is None:
        return ""
    # The date is left out for events of today.
    today = time.strftime("%Y-%m-%d", time.localtime())
    day, clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s)).split()
    return clock if day == today else f"{day} {clock}"
