"""What checkpoints cost: steps a second beside none, and the time that one blocks training.

python -m tests.benchmarks.checkpoints

Throughput: the app under torchrun, three times, taking turns (turns.py) of `--seconds`: with a checkpoint a turn, with
none, and with none again for the A/A control. The checkpoint comes after a turn's first step, so that what is written
in the background, read back and deleted burdens that turn and no other; how many did so is in the table.

Blocked: each contender of savers.py once a round, in one process. A/A is ours beside ours. `new memory` is the first
checkpoint of a process, `steady` any other.

Comparing: two ranks of ddp save at once, with and without the comparison of their states. The time is that of the
slower one, from a barrier to a barrier: the next step cannot end before.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from steadfast.checkpoint.catalog import Catalog
from steadfast.checkpoint.durable import Checkpoints, Fingerprints
from steadfast.checkpoint.writer import Writer
from steadfast.config import DdpConfig
from steadfast.parallel.precision import Precision
from steadfast.parallel.replicated import ReplicatedParallelism
from steadfast.run.directory import RunDirectory
from steadfast.storage import LocalStore
from steadfast.world.groups import WorldRank
from steadfast.world.runtime import WorkerProcess, form_world
from tests.benchmarks.commands import app_under_torchrun, parser_of_pairs, write_config
from tests.benchmarks.savers import Training, run_in_ray_train
from tests.benchmarks.speed import CASES, Case, app_sections, take_turns
from tests.benchmarks.statistics import compare_sides, paired_ratio, table, verdict
from tests.benchmarks.turns import read_text
from tests.support.events import event_lines
from tests.support.gang import Gang, Member

RATE_LIMIT, BLOCKED_LIMIT, COMPARING_LIMIT = 0.965, 0.1, 1.05
SMALL = CASES["10m"]
MODELS = {
    "gpt 10M": SMALL.model,
    "gpt 100M": {"num_layers": 14, "num_heads": 12, "embed_dim": 768, "context_length": 128},
}
STOCK = "torch.save + report"
_NEVER = 1_000_000


def throughput(options: argparse.Namespace, folder: Path) -> str:
    speed = take_turns({"speed": _run(SMALL, "speed", _NEVER, 2, 4, folder)}, 4, folder)["speed"]
    steps = max(2, round(2 * options.seconds / median(speed)))
    num_blocks = options.pairs + 1
    every = {"on": steps, "off": _NEVER, "control": _NEVER}
    commands = {side: _run(SMALL, side, period, steps, num_blocks, folder) for side, period in every.items()}
    seconds = take_turns(commands, num_blocks, folder)
    written = _checkpoints_in_turns(folder, "on")
    blocked = [event["blocked_s"] for event in written] or [float("nan")]
    head = ["model", "parameters", "interval", "off steps/s", "on steps/s", "on / off [95 %]", "A/A [95 %]"]
    row = [
        SMALL.name,
        f"{SMALL.num_params / 1e6:.2f} M",
        f"{steps} steps, {median(seconds['on']):.1f} s",
        f"{steps / median(seconds['off']):.3f}",
        f"{steps / median(seconds['on']):.3f}",
        str(paired_ratio(seconds["off"], seconds["on"])),
        str(paired_ratio(seconds["off"], seconds["control"])),
        f"{len(written)} of {options.pairs}",
        f"{1e3 * median(blocked):.0f}, {1e3 * max(blocked):.0f}",
        f"{sum(blocked) / sum(seconds['on']):.2%}",
        verdict(paired_ratio(seconds["on"], seconds["off"]), 1 / RATE_LIMIT),
    ]
    head += ["written in their turn", "blocked ms, worst", "of the time", "verdict"]
    sure = f"the interval reaches up to {RATE_LIMIT:g}"
    return f"{table([head, row])}\n{options.pairs} pairs, {sum(seconds['off']):.0f} s without; verdict: {sure}"


def _run(case: Case, side: str, period: int, steps_per_block: int, num_blocks: int, folder: Path) -> list[str]:
    """Its checkpoints come after step `period`, twice that and so on, which are the first ones of blocks."""
    case = replace(case, steps_per_block=steps_per_block)
    every = {"every": f"{period} steps"}
    sections = app_sections(case, side, num_blocks, folder, num_before=steps_per_block - 1, checkpoint=every)
    return app_under_torchrun(write_config(folder / f"{side}.yaml", **sections))


def _checkpoints_in_turns(folder: Path, side: str) -> list[dict[str, Any]]:
    """Of those turns that count. The event comes once a checkpoint has been read back and its predecessors deleted."""
    to_unix_s = time.time() - time.monotonic()
    turns = [json.loads(line) for line in read_text(folder / f"{side}-0").splitlines()][1:]
    events = event_lines(RunDirectory.at(str(folder / "runs" / side)))
    return [
        event
        for event in events
        if event["event"] == "checkpoint"
        and any(began <= event["time_s"] - to_unix_s <= ended for began, ended in turns)
    ]


def blocked(options: argparse.Namespace, folder: Path) -> str:
    pairs = dict(zip(MODELS, (options.pairs, options.pairs_100m), strict=True))
    measured = run_in_ray_train({name: (MODELS[name], pairs[name]) for name in MODELS}, folder)
    rows = [
        ["model", "state", "rival", "memory", "ours ms", "rival ms", "ours / rival [95 %]", "A/A [95 %]", "verdict"]
    ]
    notes = []
    for name, num_params, num_bytes, rounds in measured:
        steady = {who: seconds[1:] for who, seconds in rounds.items()}
        control = str(paired_ratio(steady["ours"], steady["control"]))
        subject = [f"{name}, {num_params / 1e6:.1f} M", f"{num_bytes / 1e6:.0f} MB"]
        firsts = {who: seconds[0] for who, seconds in rounds.items() if who not in ("control", "new memory")}
        for rival in [who for who in firsts if who != "ours"]:
            for memory, ours in (("steady", steady["ours"]), ("new", steady["new memory"])):
                ratio = paired_ratio(ours, steady[rival])
                blocked_ms = [f"{1e3 * median(seconds):.1f}" for seconds in (ours, steady[rival])]
                found = verdict(ratio, BLOCKED_LIMIT) if rival == STOCK else ""
                a_a = control if memory == "steady" else ""
                rows.append([*subject, rival, memory, *blocked_ms, str(ratio), a_a, found])
        first = ", ".join(f"{who} {1e3 * seconds:.0f} ms" for who, seconds in firsts.items())
        notes.append(f"{name}: {pairs[name]} pairs; the very first calls: {first}")
    sure = f"verdict: the interval reaches down to {BLOCKED_LIMIT:g}"
    return "\n".join([table(rows), *notes, sure])


def comparing(options: argparse.Namespace, folder: Path) -> str:
    rows = [["model", "state", "with ms", "without ms", "ratio [95 %]", "A/A [95 %]", "verdict"]]
    with Gang(2) as gang:
        for attempt, (name, model) in enumerate(MODELS.items(), 1):
            num_pairs = options.pairs if attempt == 1 else options.pairs_100m
            (num_bytes, seconds), _ = gang.run(_save_in_turns, attempt, model, folder / name, num_pairs)
            rows.append([name, f"{num_bytes / 1e6:.0f} MB", *compare_sides(seconds, 1, COMPARING_LIMIT)])
    return f"{table(rows)}\n{options.pairs} pairs; verdict: the interval reaches down to {COMPARING_LIMIT:g}"


def _save_in_turns(
    member: Member, attempt: int, model: dict[str, Any], folder: Path, num_pairs: int
) -> tuple[int, dict[str, list[float]]]:
    """Return the bytes of a state, and the seconds for which its saves block the slower of two ranks."""
    world = form_world(member.store, WorldRank(member.number, 2, attempt), WorkerProcess(torch.device("cpu")))
    torch.manual_seed(0)
    training = Training(model)
    parallel = ReplicatedParallelism(DdpConfig(), world, Precision(torch.device("cpu")))
    checkpoints = Checkpoints(Catalog(LocalStore(folder)), world, parallel, Writer(), Fingerprints(""))
    sides = ["with", "without", "control"]
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    step = 0
    for turn in range(num_pairs + 1):
        for side in sides[:: 1 if turn % 2 else -1]:
            step += 1
            checkpoints.compares = side != "without"
            dist.barrier(world.groups.control)
            began = time.perf_counter()
            checkpoints.save(step, training.state, {})
            dist.barrier(world.groups.control)
            seconds[side].append(time.perf_counter() - began)
            checkpoints.wait_for_commit(60.0)
            checkpoints.news()
    dist.barrier(world.groups.control)
    world.groups.destroy()
    return training.num_bytes, {side: values[1:] for side, values in seconds.items()}


PARTS: dict[str, Callable[[argparse.Namespace, Path], str]] = {
    "throughput": throughput,
    "blocked": blocked,
    "comparing": comparing,
}


def main() -> None:
    parser = parser_of_pairs(20)
    parser.add_argument("--pairs-100m", type=int, default=20, help="of the large model, whose state takes seconds")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a turn, in which one checkpoint is written")
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    options = parser.parse_args()
    for part in options.part or PARTS:
        with tempfile.TemporaryDirectory(prefix=f"{part}-") as folder:
            print(f"{part}\n\n{PARTS[part](options, Path(folder))}\n", flush=True)


if __name__ == "__main__":
    main()
