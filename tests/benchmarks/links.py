"""Seconds a step of a pipeline of two stages beside fsdp, between two hosts with a link of 1 Gbit/s.

python -m tests.benchmarks.links --pairs 20    # as root: the hosts are those of tests/e2e/lab

Two workers, one on each host, are started once for each side, and take turns as in speed.py. `kept` is fsdp with
reshard_after_forward=false, `control` the pipeline again for the A/A control. `long` is the pipeline with twice the
microbatches: the time of one microbatch is the difference of both, and the rest of a step is idle. `plan` predicts that
share.
"""

import os
import shutil
import signal
import subprocess
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from steadfast.commands.plan import plan
from steadfast.config import load_config
from tests.benchmarks.commands import ROOT, parser_of_pairs, write_config
from tests.benchmarks.speed import CASES, app_sections
from tests.benchmarks.statistics import estimate, paired_ratio, table
from tests.benchmarks.turns import read_text, take_blocks
from tests.e2e.lab.hosts import Lab

HOSTS = {"one": 11, "two": 12}
MBIT_PER_S = 1000
NUM_MICROBATCHES = 4
_COPIED = ("app", "tests", "main.py", "pyproject.toml")
_STAGES = {"kind": "pipeline", "stages": 2}
SIDES: dict[str, tuple[dict[str, Any], int]] = {
    "pipeline": (_STAGES, NUM_MICROBATCHES),
    "fsdp": ({"kind": "fsdp"}, NUM_MICROBATCHES),
    "kept": ({"kind": "fsdp", "reshard_after_forward": False}, NUM_MICROBATCHES),
    "long": (_STAGES, 2 * NUM_MICROBATCHES),
    "control": (_STAGES, NUM_MICROBATCHES),
}


def write_side(lab: Lab, side: str, num_blocks: int) -> None:
    """Write the configuration of a side, where the hosts see it at /mnt/shared."""
    parallel, num_microbatches = SIDES[side]
    case = CASES["10m"]
    case = replace(case, global_size=case.microbatch_size * num_microbatches, steps_per_block=1)
    # Each worker of a pipeline runs all microbatches, and each of fsdp its own.
    sharing = 1 if parallel is _STAGES else len(HOSTS)
    copies = {"every": "1000000 steps", "node_memory": False}
    sections = app_sections(case, side, num_blocks, Path("/mnt/shared"), sharing, parallel=parallel, checkpoint=copies)
    write_config(lab.storage / f"{side}.yaml", **sections)


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
    with ExitStack() as stack:
        processes: dict[str, list[subprocess.Popen[str]]] = {}
        for port, side in enumerate(SIDES, 29500):
            write_side(lab, side, num_blocks)
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

        return take_blocks(list(SIDES), num_blocks, lab.storage, len(HOSTS), still_alive)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> None:
    options = parser_of_pairs(20).parse_args()
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
