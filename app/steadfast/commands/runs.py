"""`runs [--delete NAME]`: list runs with date and size, or delete a run."""

import re
import sys
import time
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from steadfast.commands.options import add_run_argument, run_on_cluster, take_storage
from steadfast.errors import StorageError, UsageError
from steadfast.run.directory import RunDirectory, reading
from steadfast.run.owner import Ownership, read_owner
from steadfast.storage import LocalStore
from steadfast.storage.documents import json_line
from steadfast.units import number, plural, printable, size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from steadfast.analysis.status import Status

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")  # the pattern of `run.name`
_HEADINGS = ("run", "state", "step", "train loss", "validation loss", "last written", "size")
_RUNNING = ("running", "starting", "waiting for workers")


def add_arguments(parser: ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument("--delete", metavar="NAME", help="delete the run with this name, after a question")
    parser.add_argument("--yes", action="store_true", help="delete without a question")
    parser.add_argument(
        "--json", action="store_true", help="print one line of JSON: a list of runs, or what is deleted"
    )


def run(options: Namespace) -> int:
    """Print a line for each run, or delete a run."""
    take_storage(options)
    if options.runs:
        raise UsageError(f"runs lists all runs of --storage; for one run: status {options.runs[0]}")
    if options.yes and options.delete is None:
        raise UsageError("--yes belongs to --delete, for example: runs --delete ddp --yes")
    if options.cluster:
        return run_on_cluster(options)
    place = RunDirectory.at(options.storage)
    if options.delete is not None:
        return _delete(place, options)
    if options.json:
        print(json_line(read_entries(place)))
        return 0
    from steadfast.analysis.tables import print_page

    print_page(overview(place))
    return 0


def read_entries(place: RunDirectory) -> list[dict[str, Any]]:
    """Return a document for each run below a storage, the newest first and unreadable runs last.

    Raises:
        UsageError: there is no run.
    """
    from steadfast.analysis.status import read_all

    statuses, unreadable = read_all(place)
    if not statuses and not unreadable:
        raise UsageError(f"no run below {place.uri}; choose another place with --storage")
    entries = list(map(_entry, statuses))
    # The time comes from an age, so two readings differ by less than a second. The name orders runs of the same second.
    entries.sort(key=lambda each: (-round(each["written_s"]), each["name"]))
    return entries + [{"uri": uri, "state": "unreadable", "error": why} for uri, why in unreadable.items()]


def overview(place: RunDirectory) -> "RenderableType":
    """Return a table with a line for each run below a storage."""
    from rich.console import Group

    from steadfast.analysis.tables import table_of, text_of

    readable, unreadable = [], []
    for entry in read_entries(place):
        if "error" in entry:
            unreadable.append(text_of(entry["error"]))
        else:
            readable.append(entry)
    total = sum(each["bytes"] for each in readable)
    told = text_of(f"{plural(len(readable), 'run')}, {size(total)}, below {place.uri}")
    return Group(table_of(_HEADINGS, map(_cells, readable), numbers=_HEADINGS[2:]), *unreadable, told)


def _entry(status: "Status") -> dict[str, Any]:
    directory = RunDirectory.at(status.uri)
    # A run without an event has begun at this moment.
    times_s = [event.time_s or 0.0 for event in status.latest] or [time.time()]
    if status.step_age_s is not None:
        times_s.append(time.time() - status.step_age_s)
    with reading(directory):
        num_bytes = directory.store.num_bytes("")
    return {"name": directory.name, **status.to_json(), "written_s": max(times_s), "bytes": num_bytes}


def _cells(entry: dict[str, Any]) -> list[str]:
    losses = []
    for figures in (entry["log"], entry["metrics"]):
        loss = (figures or {}).get("loss")
        losses.append("" if loss is None else number(loss))
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry["written_s"]))
    return [entry["name"], entry["state"], str(entry["step"]), *losses, written, size(entry["bytes"])]


def _delete(place: RunDirectory, options: Namespace) -> int:
    """Delete a run, and return the exit code."""
    from steadfast.analysis.status import StatusReader

    directory = _find(place, options.delete)
    with reading(directory):
        status = StatusReader(directory).read(brief=True)
        num_bytes = directory.store.num_bytes("")
    if status.state in _RUNNING:
        raise UsageError(f"{directory.uri} is {status.state} on {status.host}, pid {status.pid}: stop it first")
    what = f"{directory.uri}: {status.state}, step {status.step}, {size(num_bytes)}"
    if not options.yes and not _confirmed(f"delete the run {what}"):
        print("nothing was deleted", file=sys.stderr)
        return 1
    # A claim keeps other commands from resuming the run meanwhile, and fails if a command on another host owns the run.
    Ownership.claim(directory.store, say=_say)
    try:
        kept = directory.delete()
        num_bytes -= directory.store.num_bytes("")
    except OSError as error:
        place_of_error = error.filename or directory.uri
        reason = error.strerror or error
        raise StorageError(
            f"{place_of_error} cannot be deleted: {reason}. The same command deletes the rest"
        ) from error
    if options.json:
        print(json_line({"deleted": directory.uri, "bytes": num_bytes, "kept": kept}))
        return 0
    print(printable(f"deleted {what}"))
    if kept:
        print(printable(f"kept what no run writes: {', '.join(kept)}"))
    return 0


def _find(place: RunDirectory, name: str) -> RunDirectory:
    """Return the run with a name below a storage.

    Raises:
        UsageError: there is no such run, or its place is a link.
    """
    # A path could lead out of the storage.
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"--delete takes the name of a run, not {name!r}; --storage PLACE is the folder that has the run"
        )
    if place.uri.startswith("file://"):
        raise UsageError(f"--delete follows no links, and {place.uri} may have some: give --storage as a path")
    directory = RunDirectory.at(place / name)
    store = directory.store
    if isinstance(store, LocalStore) and store.path.is_symlink():
        raise UsageError(f"{directory.uri} is a link, which is not followed: delete the run where the link leads to")
    with reading(directory):
        if read_owner(store) is None:
            raise UsageError(f"{directory.uri} is no run directory: it has no valid owner.json, which every run has")
    return directory


def _confirmed(what: str) -> bool:
    if not sys.stdin.isatty():
        raise UsageError(f"cannot ask whether to {what}: there is no terminal. --yes deletes without a question")
    # The question goes to stderr, because stdout may be a file or a pipe.
    print(printable(f"{what}? [y/N] "), end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr)
