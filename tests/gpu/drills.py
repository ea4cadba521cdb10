"""Drills on one GPU: `python -m tests.gpu.drills --out DIR`. README.md beside this file says what they show.

Without `--all` or `--only` it runs those that fit into eight minutes.

Exit codes: 0 all passed or were rehearsed, 1 any failed, 2 bad usage, 3 nothing could be checked, 4 none failed but
some were skipped.
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.gpu.catalog import CATALOG
from tests.gpu.machine import describe, missing
from tests.gpu.report import BAD_USAGE, NOTHING_CHECKED, exit_code, table
from tests.gpu.runner import TABLE, Drill, Result, Runner, expected_s

JOBS = 4


def main(arguments: Sequence[str] | None = None, catalog: Sequence[Drill] = CATALOG) -> int:
    """Run the drills that the command line names, and return the exit code."""
    options = _parser().parse_args(arguments)
    if options.list:
        for drill in catalog:
            print(f"{drill.name:<16}{'first' if drill.first else '     '} {drill.expected_s:>4.0f} s  {drill.summary}")
        return 0
    unknown = set(options.only) - {drill.name for drill in catalog}
    if unknown:
        print(f"no drill is called {', '.join(sorted(unknown))}; --list names them", file=sys.stderr)
        return BAD_USAGE
    if lacking := missing(options.device):
        remedy = "name another by GPU_PYTHON or PATH, or rehearse with --device cpu"
        print(f"nothing was checked: {lacking}; {remedy}", file=sys.stderr)
        return NOTHING_CHECKED

    chosen = [drill for drill in catalog if drill.first or options.all]
    if options.only:
        chosen = [drill for drill in catalog if drill.name in options.only]
    if options.work is not None:
        return _run(chosen, options, options.work)
    with tempfile.TemporaryDirectory(prefix="drills-") as work:
        return _run(chosen, options, Path(work))


def _run(chosen: Sequence[Drill], options: argparse.Namespace, work: Path) -> int:
    for folder in (options.out, work):
        folder.mkdir(parents=True, exist_ok=True)
    out = options.out.resolve()  # drills run in another directory
    jobs = options.jobs or (JOBS if options.device == "cuda" else 1)
    machine = describe(options.commit)
    print(f"{len(chosen)} drills; on an H200 about {expected_s(chosen, jobs):.0f} s", flush=True)

    def table_of(results: Sequence[Result]) -> str:
        return table(results, machine, options.device)

    runner = Runner(out, work.resolve(), options.device, options.minutes, jobs, table_of)
    # A machine that is rented by the command ends the command before it takes the results.
    before = {number: signal.signal(number, lambda *_: runner.stop()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        results = runner.run(chosen)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    text = table_of(results)
    (out / TABLE).write_text(text)
    print(text)
    return exit_code(results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.gpu.drills", allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("gpu-drills"), help="folder for results, logs and table")
    parser.add_argument("--work", type=Path, help="folder for the drills' files; a temporary one by default")
    parser.add_argument("--minutes", type=_positive, default=7.6, help="no drill goes on for longer")
    parser.add_argument("--only", type=lambda names: names.split(","), default=[], help="names, with commas between")
    parser.add_argument("--all", action="store_true", help="also those that do not fit into eight minutes")
    parser.add_argument("--list", action="store_true", help="name the drills and exit")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses the drills over gloo")
    parser.add_argument("--jobs", type=_count, help="drills side by side, if they measure no time")
    parser.add_argument("--commit", default="", help="what to call this code, where the copy has no git")
    return parser


def _count(text: str) -> int:
    return int(_positive(str(int(text))))


def _positive(text: str) -> float:
    value = float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
