"""The verb `chaos`: all contenders through the matrix, then the table and the verdict."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from app.checkpoint.catalog import Catalog
from app.checkpoint.weights import read_whole
from app.config import Config, load_config
from app.data import SampleOrder, build_dataset
from app.data.order import samples_digest
from app.errors import TrainingError
from app.run.ledger import History
from app.storage import LocalStore
from tests.chaos import contenders, processes
from tests.chaos.contenders import OURS, TORCHRUN
from tests.chaos.drills import Drills, Stream
from tests.chaos.loop import Job
from tests.chaos.matrix import CLAIMS, FAULTS, NUM_STEPS, PACE_S, SNAPSHOT_STEPS, TRAINING
from tests.chaos.report import Line, Row, broken, table

_EQUAL = 1e-10  # largest difference between fp64 weights


def chaos(file: str, overrides: Sequence[str], minutes: float) -> int:
    """Prints the table. Returns the exit code: 0, or 1 when a claim does not hold.

    Args:
        file, overrides: the configuration, as on the command line.
        minutes: faults that would begin later are left out.
    """
    began = time.time()
    words = [*overrides, *TRAINING]
    config = load_config(file, words)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    os.environ |= {"RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}  # no other command joins this cluster
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    processes.adopt_orphans()
    try:
        rows = Matrix(["--config", file, *words], config, folder, began, began + 60 * minutes).run()
    except KeyboardInterrupt:
        processes.end(list(processes.descendants()))
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        processes.end(list(processes.descendants()))
    print(f"\n{table(rows, [fault.name for fault in FAULTS])}\n")
    wrong = broken(rows, CLAIMS, OURS, TORCHRUN)
    for sentence in wrong:
        print(f"claim broken: {sentence}")
    if wrong:
        print(f"what the contenders wrote is in {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{'claims are broken' if wrong else 'every claim holds'}; {time.time() - began:.0f} s in all")
    return 1 if wrong else 0


@dataclass
class Matrix:
    """Begun and to be ended at times since the epoch."""

    words: list[str]
    config: Config
    folder: Path
    began_s: float
    until_s: float

    def run(self) -> list[Row]:
        """Ours first, since the claims are about it."""
        from tests.chaos.bed import Bed

        self._say("undisturbed runs, while a Ray cluster of two nodes starts")
        references = [
            contenders.ours_undisturbed(self.words, self.folder),
            contenders.baseline_undisturbed(self._job("baseline-undisturbed")),
        ]
        drills = [Drills(each, self._say, self.until_s) for each in references]
        for each in references:
            each.start()
        bed = Bed(2)
        for drill in drills:
            if not drill.finish():
                raise TrainingError(f"the undisturbed run failed: see {drill.contender.folder}.log")
        pace = self.folder / "pace"
        ours = contenders.ours(self.words, self.folder, bed, str(pace))
        equal = partial(_equal, partial(self._weights, "undisturbed"), partial(self._weights, OURS))
        rows = Drills(ours, self._say, self.until_s).run(pace, self._planned, equal)
        undisturbed = references[1].folder
        for rival in (
            contenders.torchrun(self._job("torchrun", SNAPSHOT_STEPS)),
            contenders.ray_train(self._job("ray-train", SNAPSHOT_STEPS), bed),
            contenders.torchrun_by_default(self._job("torchrun-defaults")),
            contenders.ray_train(self._job("ray-train-defaults"), bed, "default"),
        ):
            equal = partial(_equal, partial(_final, undisturbed), partial(_final, rival.folder))
            rows += Drills(rival, self._say, self.until_s).run(pace, partial(_committed, undisturbed), equal)
        return rows

    def _say(self, text: str) -> None:
        print(f"{time.time() - self.began_s:4.0f} s  {text}", flush=True)

    def _job(self, name: str, snapshot_steps: int = 0) -> Path:
        path = self.folder / f"{name}.job"
        job = Job(self.config, self.folder / name, snapshot_steps, str(self.folder / "pace"), PACE_S)
        path.write_bytes(pickle.dumps(job))
        return path

    def _planned(self) -> dict[int, Line]:
        """What the ledger of ours has to say, from the seed alone."""
        size, seed = self.config.batch.global_size, self.config.run.seed
        order = SampleOrder(len(build_dataset(self.config.data)), self.config.data.held_out_fraction, seed)
        lines = {}
        for step in range(1, NUM_STEPS + 1):
            positions = np.arange((step - 1) * size, step * size)
            digest = samples_digest(order.train(positions), positions, seed)
            lines[step] = {"step": step, "num_samples": size, "samples_digest": f"{digest:016x}"}
        return lines

    def _weights(self, name: str) -> dict[str, Tensor]:
        """Of the last checkpoint of one of our runs."""
        return read_whole(Catalog(LocalStore(self.folder / name)), NUM_STEPS)


def _equal(one: Callable[[], dict[str, Tensor]], other: Callable[[], dict[str, Tensor]]) -> bool:
    weights = other()
    return max((value - weights[name]).abs().max().item() for name, value in one().items()) <= _EQUAL


def _final(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = torch.load(folder / "final.pt")
    return weights


def _committed(folder: Path) -> dict[int, Line]:
    return History(Stream(folder / "steps.jsonl").read()).committed
