"""Seconds a step of a pipeline of two stages beside fsdp, between two hosts with a link of 1 Gbit/s.

python -m tests.benchmarks.links --pairs 20    # as root: the hosts are those of tests/e2e/lab

Two workers, one on each host, are started once for each side, and take turns as in speed.py. `kept` is fsdp with
reshard_after_forward=false, `control` the pipeline again for the A/A control. `long` is the pipeline with twice the
microbatches: the time of one microbatch is the difference of both, and the rest of a step is idle. `plan` predicts that
share.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from steadfast.commands.plan import plan
from steadfast.config import load_config
from tests.benchmarks.commands import ROOT, end_on_sigterm
from tests.benchmarks.speed import CASES
from tests.benchmarks.statistics import estimate, paired_ratio, table
from tests.benchmarks.turns import give_turn, read_text
from tests.e2e.lab.hosts import Lab

HOSTS = {"one": 11, "two": 12}
MBIT_PER_S = 1000
NUM_MICROBATCHES = 4
_START_S, _TURN_S = 300.0, 120.0
_COPIED = ("app", "tests", "main.py", "pyproject.toml")
_STAGES = {"kind": "pipeline", "stages": 2}
SIDES: dict[str, tuple[dict[str, Any], int]] = {
    "pipeline": (_STAGES, NUM_MICROBATCHES),
    "fsdp": ({"kind": "fsdp"}, NUM_MICROBATCHES),
    "kept": ({"kind": "fsdp", "reshard_after_forward": False}, NUM_MICROBATCHES),
    "long": (_STAGES, 2 * NUM_MICROBATCHES),
    "control": (_STAGES, NUM_MICROBATCHES),
}


def write_config(lab: Lab, side: str, num_blocks: int) -> Path:
    """Write the configuration of a side, and return its path outside of the hosts."""
    parallel, num_microbatches = SIDES[side]
    case = CASES["10m"]
    # Each worker of a pipeline runs all microbatches, and each of fsdp its own.
    num_forwards = num_microbatches // (1 if parallel is _STAGES else len(HOSTS))
    turns = {
        "folder": "/mnt/shared",
        "side": side,
        "num_forwards": num_forwards,
        "steps_per_block": 1,
        "num_blocks": num_blocks,
    }
    sections = {
        "run": {"storage": "/mnt/shared/runs", "name": side, "steps": num_blocks + 1, "report": False},
        "parallel": parallel,
        "batch": {"global_size": case.microbatch_size * num_microbatches, "microbatch_size": case.microbatch_size},
        "model": {"kind": "gpt", **case.model},
        "data": {"kind": "text", "context_length": case.model["context_length"], "validation_fraction": 0.0},
        "schedule": {"kind": "cosine", "warmup_steps": 1},
        "scaling": {"num_workers": len(HOSTS), "gpus_per_worker": 0},
        "precision": {"kind": "fp32"},
        "checkpoint": {"every": "1000000 steps", "node_memory": False},
        "validation": {"every": None},
        "task": {"target": "tests.benchmarks.turns:TurnTakingTask", "args": turns},
    }
    path = lab.storage / f"{side}.yaml"
    path.write_text(yaml.safe_dump(sections, sort_keys=False))
    return path


def start(lab: Lab, side: str, port: int) -> list[subprocess.Popen[str]]:
    """Start a worker of a side on each host."""
    started = []
    for rank, name in enumerate(HOSTS):
        ranks = {"RANK": str(rank), "WORLD_SIZE": str(len(HOSTS)), "LOCAL_RANK": "0"}
        master = {"MASTER_ADDR": lab.addresses["one"], "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "eth0"}
        home = {"PYTHONPATH": "/root/steadfast:/root/steadfast/app", "OMP_NUM_THREADS": "1"}
        command = (
            f"cd ~/steadfast && python main.py --config /mnt/shared/{side}.yaml > /mnt/shared/{side}-{name}.log 2>&1"
        )
        started.append(lab.start(name, command, **ranks, **master, **home))
    return started


def take_turns(lab: Lab, num_pairs: int) -> dict[str, list[float]]:
    """Return the seconds of each side's steps, but for the first."""
    num_blocks = num_pairs + 1
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    with ExitStack() as stack:
        processes: dict[str, list[subprocess.Popen[str]]] = {}
        for port, side in enumerate(SIDES, 29500):
            write_config(lab, side, num_blocks)
            processes[side] = start(lab, side, port)
            for process in processes[side]:
                stack.callback(_end, process)

        def still_alive() -> None:
            for side, both in processes.items():
                for name, process in zip(HOSTS, both, strict=True):
                    code = process.poll()
                    assert code in (None, 0), (
                        f"{side} on {name} ended with {code}: {read_text(lab.storage / f'{side}-{name}.log')}"
                    )

        for block in range(num_blocks):
            for side in list(SIDES) if block % 2 else list(SIDES)[::-1]:
                took = give_turn(lab.storage, side, block, len(HOSTS), _TURN_S if block else _START_S, still_alive)
                if block:
                    seconds[side].append(took)
    return seconds


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> None:
    end_on_sigterm()
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=20)
    options = parser.parse_args()
    with Lab() as lab:
        for name, number in HOSTS.items():
            lab.add(name, number)
            lab.narrow(name, MBIT_PER_S)
            for part in _COPIED:
                source, target = ROOT / part, lab.home(name) / "steadfast" / part
                target.parent.mkdir(exist_ok=True)
                shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
        seconds = take_turns(lab, options.pairs)
        # The task of the benchmark would wait for its turn.
        own_task = ["task={kind: language_modeling}"]
        (world,) = plan(load_config(str(lab.storage / "pipeline.yaml"), own_task), None)["worlds"]
    rows = [["side", "ms/step", "ratio to the pipeline [95 %]"]]
    for side in SIDES:
        ratio = paired_ratio(seconds[side], seconds["pipeline"])
        rows.append([side, f"{1e3 * median(seconds[side]):.0f}", str(ratio)])
    print(table(rows))
    idle = []
    for short_s, long_s in zip(seconds["pipeline"], seconds["long"], strict=True):
        idle.append(1 - (long_s - short_s) / short_s)
    print(f"idle share of the pipeline: {estimate(idle)} measured, {world['idle']:.3f} by plan; {options.pairs} pairs")


if __name__ == "__main__":
    main()
