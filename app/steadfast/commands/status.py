"""`status [RUN] [--watch | --live]`: show the status of one run or of all runs.

The verb works on any machine that sees the run directories.
"""

import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from time import sleep
from typing import TYPE_CHECKING

from steadfast.commands.options import add_run_argument, run_on_cluster, take_storage
from steadfast.commands.runs import overview, read_entries
from steadfast.errors import UsageError
from steadfast.run.directory import RunDirectory, find_run, reading
from steadfast.storage.documents import json_line
from steadfast.telemetry.outcome import SHORT_S
from steadfast.units import compact, duration, in_ranges, in_words, joined, node_name, number, plural, size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from steadfast.analysis.status import Node, Status
    from steadfast.run.watching import Worker
    from steadfast.telemetry.interruptions import Interruption

_EVERY_S = 1.0
_LONG_S = 2.0  # a phase that takes longer is shown with its seconds
_WORKERS_S = 2.0  # longest wait for the workers' progress
_LOSSES = {
    "worker": "a worker",
    "workers_of_node": "a node's workers",
    "workers": "all workers",
    "node": "a node",
    "everything": "all but storage",
}
_NUM_PIDS = 8  # of the workers of a node; --json has all of them
_NUM_INTERRUPTIONS = 8  # number of newest interruptions on the page; --json has all of them


def add_arguments(parser: ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument("--watch", action="store_true", help="refresh the page every second, until Ctrl-C")
    live = "show the page here and as a local web page, whose address is printed"
    parser.add_argument("--live", action="store_true", help=live)
    port = "port of the web page, by default a free one"
    parser.add_argument("--port", type=int, default=0, metavar="N", help=port)
    parser.add_argument("--json", action="store_true", help="print JSON for scripts: one object, or a list of all runs")


def run(options: Namespace) -> int:
    """Print the status of a run, or a line for each run."""
    take_storage(options)
    if len(options.runs) > 1 or options.watch + options.live + options.json > 1:
        raise UsageError("status takes one run or none, and one of --watch, --live and --json: status ddp --watch")
    if options.live:
        return _live(options)
    if options.port:
        raise UsageError("--port is the port of the web page of --live: status ddp --live --port 8765")
    if options.cluster:
        return run_on_cluster(options)
    show = _all(options.storage)
    if options.runs:
        show = _one(options.runs[0], options.storage, options.watch)
    from steadfast.analysis.tables import print_page

    if options.json:
        print(json_line(show(True)))
    elif options.watch:
        _watch(lambda: show(False))
    else:
        print_page(show(False))
    return 0


def _live(options: Namespace) -> int:
    """Show a run in the terminal and as a web page, until Ctrl-C."""
    from rich.console import Group

    from steadfast.analysis.live.feed import Feed
    from steadfast.analysis.live.server import LiveServer
    from steadfast.analysis.tables import text_of

    if not options.runs:
        raise UsageError("--live shows one run: status ddp --live")
    if options.cluster:
        raise UsageError(
            "--live serves its page on this machine alone. On the head, run status RUN --live --port 8765; here, run "
            "ssh -L 8765:127.0.0.1:8765 HEAD, and open the address that the head has printed"
        )
    feed = Feed(find_run(options.runs[0], options.storage))
    with LiveServer(feed, options.port) as server:
        # The address is printed too, because a terminal in which Ctrl-C was pressed no longer shows the page.
        print(f"live page   {server.url}", flush=True)
        _watch(lambda: Group(text_of(f"live page   {server.url}\n"), page(feed.status())))
    return 0


def _one(name: str, storage: str, watching: bool) -> Callable[[bool], object]:
    from steadfast.analysis.status import StatusReader

    # One reader serves all refreshes of --watch, because it keeps the goodput between two readings of the ledger.
    reader = StatusReader(find_run(name, storage), watching=True)

    def show(as_json: bool) -> object:
        with reading(reader.directory):
            status = reader.read()
            until_s = time.monotonic() + _WORKERS_S
            # A run writes the progress of its workers once it has seen the mark of the first reading.
            while not watching and status.takes_requests and not status.workers and time.monotonic() < until_s:
                sleep(0.3)
                status = reader.read()
        if as_json:
            return status.to_json()
        return page(status)

    return show


def _all(storage: str) -> Callable[[bool], object]:
    place = RunDirectory.at(storage)  # parent of all run directories

    def show(as_json: bool) -> object:
        return read_entries(place) if as_json else overview(place)

    return show


def _watch(show: Callable[[], object]) -> None:
    from rich.console import Console
    from rich.live import Live

    # The alternate screen keeps the content of the terminal, which is shown again afterwards. `auto_refresh` would
    # redraw the same page from a thread, four times a second.
    with Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live:
        while True:
            live.update(show(), refresh=True)  # type: ignore[arg-type]
            sleep(_EVERY_S)


def page(status: "Status") -> "RenderableType":
    """Return the page with the full status of one run."""
    from rich.table import Table

    from steadfast.analysis.tables import text_of

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _lines(status):
        if text:
            table.add_row(name, text_of(text))
    return table


def _lines(status: "Status") -> Iterator[tuple[str, str]]:
    yield "run", status.uri
    yield "state", _state(status)
    yield "progress", _progress_in_words(status)
    yield from _figures(status)
    yield "workers", "\n".join(_workers(status))
    yield "validation", in_words(status.metrics or {})
    yield "checkpoint", _checkpoint(status)
    yield "at risk", _at_risk(status)
    found = status.goodput
    # The start takes most of a short run, so its goodput would say nothing about failures.
    if found and found["wall_s"] >= SHORT_S:
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
    if status.stuck:  # the remaining time is unknown then
        parts.append(status.stuck)
    elif status.state == "running":
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
    yield "memory", f"{size(log.memory_bytes)}, peak on rank 0"
    world = [plural(log.world_size, "worker")]
    if status.nodes:
        world.append(plural(len(status.nodes), "node"))
    yield "world", joined(world)
    yield "nodes", "\n".join(map(_node, status.nodes))


def _node(node: "Node") -> str:
    """Return the line of a node: its ranks, GPUs and own times."""
    ranks = in_ranges("rank", node.ranks)
    gpus = [f"{count} x {gpu}" for gpu, count in Counter(node.gpus).items()]
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


def _workers(status: "Status") -> Iterator[str]:
    """Yield a line for each node, with the phases and pids of its workers."""
    by_node: dict[str, dict[str, list[Worker]]] = {}
    for worker in status.workers:
        phase = worker.phase
        if worker.phase_s > _LONG_S:
            phase += f" for {duration(worker.phase_s)}"
        by_node.setdefault(worker.host or node_name(worker.node), {}).setdefault(phase, []).append(worker)
    for node, phases in by_node.items():
        parts = []
        for phase, workers in phases.items():
            ranks = in_ranges("rank", [worker.rank for worker in workers])
            pids = ", ".join(str(worker.pid) for worker in workers[:_NUM_PIDS] if worker.pid)
            parts.append(f"{ranks} (pid {pids}) {phase}" if pids else f"{ranks} {phase}")
        yield f"{node} {joined(parts)}"


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
    losses = [f"{_LOSSES[name]} {steps}" for name, steps in status.log.at_risk.items()]
    return f"steps to repeat if lost: {joined(losses)}" if losses else ""


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
