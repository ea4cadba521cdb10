"""How long the survivors of a killed worker stand still: ours, torchrun's and Ray Train's, three workers on one node.

python -m tests.benchmarks.kills --rounds 5

The contenders, their model and their settings are those of the verb `chaos`, one after another in one run.
"""

import argparse
import os
import pickle
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ray.cluster_utils import Cluster

from steadfast.config import load_config
from tests.benchmarks.statistics import table
from tests.chaos import contenders
from tests.chaos.contenders import RAY_TRAIN, TORCHRUN, Contender
from tests.chaos.drills import Drills
from tests.chaos.loop import Job
from tests.chaos.matrix import FAULTS, SNAPSHOT_STEPS, TRAINING
from tests.chaos.report import Row
from tests.chaos.yardstick import Yardstick
from tests.support import processes

NUM_WORKERS = 3
LIMITS = {TORCHRUN: 0.15, RAY_TRAIN: 0.05}  # of the stall that a rival's workers have
_CONFIG = "ddp.yaml"


@dataclass
class OneNode:
    """In the place of chaos's bed of several nodes with one worker each."""

    address: str

    @property
    def nodes(self) -> list[str]:
        return ["the only one"] * NUM_WORKERS


def measure(rounds: int, folder: Path) -> dict[str, list[Row]]:
    config, pace = load_config(_CONFIG, TRAINING), folder / "pace"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": NUM_WORKERS, "include_dashboard": False})
    node = OneNode(cluster.address)

    def job(name: str) -> Path:
        path = folder / f"{name}.job"
        path.write_bytes(pickle.dumps(Job(config, folder / name, SNAPSHOT_STEPS, str(pace))))
        return path

    elastic = ("--standalone", "--nproc-per-node", str(NUM_WORKERS), "--max-restarts", "100")
    loop = "tests.chaos.torchrun_loop"
    command = ("-m", "torch.distributed.run", *elastic, "-m", loop, str(job("torchrun")))
    everyone = [
        contenders.ours(["--config", _CONFIG, *TRAINING], folder, node, str(pace)),
        # Workers that share the agent's store may wait for each other for ever (pytorch issue 135712).
        Contender(
            TORCHRUN, folder / "torchrun", command, loop, node, environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        ),
        contenders.ray_train(job("ray-train"), node),
    ]
    try:
        return {each.name: _drilled(each, rounds, pace) for each in everyone}
    finally:
        cluster.shutdown()


def _drilled(contender: Contender, rounds: int, pace: Path) -> list[Row]:
    contender.faults = FAULTS[:1] * rounds
    with Yardstick() as yardstick:
        drills = Drills(contender, print, pace, yardstick)
        drills.begin()
        for fault in contender.faults:
            drills.drill(fault)
        return drills.end(planned=dict, equal=lambda: True)  # the verb judges results, this compares stalls


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    processes.adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        os.environ |= {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        measured = measure(parser.parse_args().rounds, Path(folder))
    stalls = {name: [row.stall_s for row in rows if row.stall_s is not None] for name, rows in measured.items()}
    ours = median(next(iter(stalls.values())))
    rows = [["contender", "kills", "steps redone", "stall median s", "all", "ours / theirs", "limit"]]
    for name, values in stalls.items():
        redone = " ".join(str(row.redone) for row in measured[name])
        share = f"{ours / median(values):.3f}"
        limit = f"{LIMITS[name]:g}" if name in LIMITS else ""
        seconds = " ".join(f"{v:.2f}" for v in values)
        rows.append([name, str(len(values)), redone, f"{median(values):.2f}", seconds, share, limit])
    print(table(rows))


if __name__ == "__main__":
    main()
