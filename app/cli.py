"""The command line: `python main.py [verb] --config FILE [key=value ...]`.

Nothing heavy is imported before the configuration has been read, so a typing error is told in a fraction of a second.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from app.config import Config, load_config
from app.errors import SteadfastError, UsageError
from app.interrupts import EXIT_STOPPED

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

TRY = """Three commands to try:
  python main.py --config ddp.yaml                     train a small GPT on this machine
  python main.py --config ddp.yaml optimizer.lr=3e-4   the same with another learning rate
  python main.py --help                                everything else"""

HELP = """%(prog)s [verb] --config FILE [key=value ...]

run:
  train (default)   train, or resume where the run stopped
  scale RUN --workers MIN:MAX   change the bounds of a run that is under way

look:
  doctor RUN        read every checkpoint of a run, and compare it with what was written
  export RUN --out FILE [--step N]   the weights of a checkpoint, by default the newest, as .safetensors or .pt

prove:
  chaos             do every fault to this application, stock Ray Train and torchrun on this machine, and compare;
                    --minutes N: no fault begins later (4.1); 9 is enough for all

elsewhere:
  --cluster FILE    on the head of the cluster that `ray up FILE` started; may be left, and given again, at any time
  --job             as a Ray job of this machine's cluster, which outlives this terminal

FILE is taken as given, else from configs/. key=value overrides it, with dots for sections: batch.global_size=96.

exit codes: 0 finished, 1 training failed, 2 bad usage or configuration, 3 stopped on request (resumable)"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="main.py", usage=HELP, add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true", help="show this and exit")
    parser.add_argument("-c", "--config", metavar="FILE", help="what to train")
    parser.add_argument("--cluster", metavar="FILE", help="where to run it, from anywhere")
    parser.add_argument("--job", action="store_true", help="so that it outlives this terminal")
    parser.add_argument("--workers", metavar="MIN:MAX", help=argparse.SUPPRESS)
    parser.add_argument("--out", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--step", type=int, help=argparse.SUPPRESS)
    parser.add_argument("-v", "--verbose", action="store_true", help="tracebacks, phase times, Ray's own messages")
    parser.add_argument("--minutes", type=float, default=4.1, help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    return parser


def main(started_s: float, argv: Sequence[str] | None = None) -> int:
    """Returns the exit code. Every expected error is one message on stderr, without a traceback unless -v."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments:
        print(TRY)
        return 0
    verbose = any(argument in ("-v", "--verbose") for argument in arguments)
    try:
        return _run(arguments, started_s)
    except SteadfastError as error:
        if verbose:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_STOPPED


def _run(arguments: list[str], started_s: float) -> int:
    parser = build_parser()
    options = parser.parse_intermixed_args(arguments)  # argparse itself exits with 2
    if options.help:
        parser.print_help()
        return 0
    overrides = [word for word in options.words if "=" in word and "://" not in word.partition("=")[0]]
    verbs = [word for word in options.words if word not in overrides]
    trains, config = verbs in ([], ["train"]), None
    if verbs[:1] not in (["scale"], ["doctor"], ["export"]):
        if not trains and verbs != ["chaos"]:
            known = "train, scale, doctor, export, chaos"
            raise UsageError(f"unknown verb {' '.join(verbs)}; there are: {known}. Overrides are written key=value")
        if options.config is None:
            raise UsageError("--config FILE is missing, for example --config ddp.yaml")
        config = load_config(options.config, overrides)
    if options.cluster:
        from app.remote import run_on_head

        there = _without(arguments, "--cluster", options.cluster)
        return run_on_head(options.cluster, [*there, "--job"] if trains else there, options.verbose)
    if config is None:
        return _of_a_run(verbs[0], verbs[1:], options)
    if verbs == ["chaos"]:
        from app.chaos.command import chaos

        return chaos(options.config, overrides, options.minutes)
    if options.job:
        from app.orchestration.job import run_as_job

        return run_as_job(config, _without(arguments, "--job"))
    return train(config, started_s, options.verbose)


def _without(arguments: list[str], option: str, value: str | None = None) -> list[str]:
    """The command line less one option."""
    left = [each for each in arguments if each not in (option, f"{option}={value}")]
    if value is not None and option in arguments:
        del left[arguments.index(option)]
    return left


def _of_a_run(verb: str, runs: list[str], options: argparse.Namespace) -> int:
    """The verbs whose argument is a run that there is already."""
    needed = {"scale": ("--workers", "2:8"), "export": ("--out", "model.safetensors")}.get(verb)
    if len(runs) != 1 or (needed and getattr(options, needed[0].strip("-")) is None):
        example = " ".join([verb, "ddp", *(needed or ())])
        raise UsageError(f"{verb} takes one run{f' and {needed[0]}' if needed else ''}, for example: {example}")
    if verb == "scale":
        from app.scale import scale

        print(scale(runs[0], options.workers))
        return 0
    from app.checkpoint.catalog import Catalog
    from app.rundir import base, find_run

    catalog = Catalog(find_run(runs[0]).store)
    if verb == "export":
        from app.checkpoint.export import export

        print(export(catalog, options.step, base() / options.out))  # where run.init_from looks for it
        return 0
    from app.checkpoint.doctor import examine

    all_good = True
    for line, good in examine(catalog):
        print(line, flush=True)  # each takes a while
        all_good &= good
    return 0 if all_good else 1


def train(config: Config, started_s: float, verbose: bool) -> int:
    """Trains under torchrun where that started this process, else under Ray."""
    sys.path.insert(0, os.getcwd())  # the user's own code by import path
    from app.imports import load_target

    for name in ("model", "task", "data"):  # here, where a mistake costs a second and not a start of Ray
        if target := getattr(getattr(config, name), "target", None):
            load_target(target, f"{name}.target")
    if under_torchrun():
        from app.torchrun import run_under_torchrun

        return run_under_torchrun(config, started_s, verbose)
    from app.launch import launch

    return launch(config, started_s, verbose)


def under_torchrun() -> bool:
    """Whether torchrun, or somebody who sets its environment, started this process.

    Raises:
        UsageError: some of its variables are set and others are not.
    """
    present = [name for name in _TORCHRUN if name in os.environ]
    missing = [name for name in _TORCHRUN if name not in os.environ]
    if present and missing:
        raise UsageError(
            f"{', '.join(present)} set without {', '.join(missing)}: half of torchrun's environment. "
            "Start with torchrun, or unset them to train under Ray"
        )
    return bool(present)
