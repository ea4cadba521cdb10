"""Command line: `steadfast [verb] --config FILE [key=value ...]`."""

import os
import select
import signal
import sys
import traceback
from argparse import Namespace
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from textwrap import fill

from steadfast.commands import VERBS
from steadfast.commands.options import is_override, parser_of, unknown_verb
from steadfast.errors import SteadfastError, UsageError, shortened, traceback_of
from steadfast.launch.ranks import end_rank, of_torchrun
from steadfast.run.interrupts import EXIT_STOPPED, stop_requested
from steadfast.units import printable

_HELP_WIDTH = 100
_EXIT_PIPE = 128 + signal.SIGPIPE  # the exit code that shells report for a program killed by SIGPIPE

TRY = """Three commands to try:
  steadfast init FOLDER      write a starter to change: configuration, your own code, cluster file
  steadfast --config FILE    train; in a checkout, python main.py --config ddp.yaml trains a small GPT
  steadfast --help           show all verbs and options"""

HELP = """usage: steadfast [verb] --config FILE [key=value ...]
{verbs}

elsewhere:
  --cluster FILE    run on the head of the cluster that `ray up FILE` started. Ctrl-C only leaves the
                    command, which goes on there; the same command shows it again
  --job             run as a Ray job of this machine's cluster, which outlives this terminal

FILE is a path, or the name of a file in configs/. key=value overrides a key of FILE, with dots for
sections: batch.global_size=96.

exit codes: 0 finished, 1 training failed, 2 bad usage or configuration, 3 stopped on request (resumable)

options:
  -h, --help            show this help and exit; after a verb, show the help of the verb
  --version             show the versions of steadfast, torch and ray, and exit
  -c FILE, --config FILE
                        configuration to train
  -v, --verbose         show tracebacks, phase times and Ray's own messages"""


def main(started_s: float, argv: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code.

    Args:
        started_s: Unix time at which the process started.
        argv: the arguments of the command, by default those of the process.
    """
    _replace_closed_streams()
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments:
        print(TRY)
        return 0
    # If the error is in the command line itself, there are no parsed options.
    verbose = "-v" in arguments or "--verbose" in arguments
    try:
        exit_code = _run(arguments, started_s)
        # A reader that has left is noticed here. The flush at the interpreter's end could no longer change the exit
        # code.
        sys.stdout.flush()
        return exit_code
    except SteadfastError as error:
        if stop_requested():
            return EXIT_STOPPED
        said = f"error: {error}"
        if verbose:
            said = "".join(traceback.format_exception(error)) + said
        # All ranks may fail with this error at once, but only one of them should report it.
        if of_torchrun():
            end_rank(error, said)
        print(printable(said), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_STOPPED
    # Any other exception is an error of this program or of the user's code, so its traceback is shown.
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_has_left():
            return _EXIT_PIPE
        if of_torchrun():
            text = "".join(traceback.format_exception(error))
            if not verbose:
                text = shortened(traceback_of(error))
            end_rank(error, text)
        raise


def _reader_has_left() -> bool:
    """Return whether the reader of stdout has gone, as after `| head`.

    If so, further output is discarded.
    """
    # The mask 0 asks for no events, but poll always reports errors. A pipe without a reader is the error POLLERR.
    output = select.poll()
    output.register(sys.stdout, 0)
    if not any(events & select.POLLERR for _, events in output.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes the rest of the output at exit
    return True


def _replace_closed_streams() -> None:
    """Open /dev/null for a standard stream that the caller has closed, because Ray needs both streams."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - open until the process ends


def _run(arguments: list[str], started_s: float) -> int:
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError("the working directory has been deleted; change to one that exists") from error
    name, rest = split_verb(arguments)
    if name is None:
        if "-h" in rest or "--help" in rest:
            print(HELP.format(verbs=_describe_verbs()))
            return 0
        if "--version" in rest:
            print(_versions())
            return 0
        name = "train"
    parser, verb = parser_of(name)
    # Intermixed parsing allows overrides on both sides of an option. Argparse itself exits with 0 after help and with 2
    # after an error.
    return int(verb.run(parser.parse_intermixed_args(rest, Namespace(arguments=arguments, started_s=started_s))))


def split_verb(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Split a command line into its verb and the remaining arguments.

    The verb may be at any position, and is None if there is none.

    Raises:
        UsageError: the first argument looks like a verb, but is unknown.
    """
    first = arguments[0]
    if not first.startswith("-") and not is_override(first) and first not in VERBS:
        raise unknown_verb(first)
    before = ""
    for index, word in enumerate(arguments):
        # The file or folder after such an option may have the name of a verb.
        if word in VERBS and before not in ("-c", "--config", "--cluster", "--storage"):
            return word, arguments[:index] + arguments[index + 1 :]
        before = word
    return None, arguments


def _versions() -> str:
    """Return the versions of this program, torch and Ray in one line."""
    found = []
    for package in ("steadfast", "torch", "ray"):
        # Importing the packages would take seconds. Their metadata can be missing: runs under torchrun need no Ray, and
        # a checkout may be used without an installation.
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} not installed")
    return ", ".join(found)


def _describe_verbs() -> str:
    column = 4 + max(len(verb.usage) for verb in VERBS.values())
    lines = []
    for heading, verbs in groupby(VERBS.values(), lambda verb: verb.heading):
        lines.append(f"\n{heading}:")
        for verb in verbs:
            begun = f"  {verb.usage}".ljust(column)
            lines.append(fill(verb.summary, _HELP_WIDTH, initial_indent=begun, subsequent_indent=" " * column))
    return "\n".join(lines)
