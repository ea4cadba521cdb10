"""The verb `chaos`: all contenders through the matrix, then the table and the verdict."""

import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from steadfast.checkpoint.catalog import Catalog
from steadfast.checkpoint.weights import read_whole
from steadfast.config import Config, load_config
from steadfast.data import SampleOrder, build_dataset
from steadfast.errors import TrainingError
from steadfast.storage import LocalStore
from tests.chaos import contenders
from tests.chaos.contenders import OURS, TORCHRUN, Contender
from tests.chaos.drills import Drills, Stream
from tests.chaos.loop import Job
from tests.chaos.matrix import CLAIMS, FAULTS, NUM_STEPS, SNAPSHOT_STEPS, TRAINING
from tests.chaos.report import Line, Row, broken, only_stalls, table
from tests.chaos.yardstick import Yardstick
from tests.support import processes
from tests.support.history import History
from tests.support.orders import samples_digest

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
        with Yardstick() as yardstick:
            matrix = Matrix(["--config", file, *words], config, folder, began, began + 60 * minutes)
            rows = matrix.run(yardstick)
    except KeyboardInterrupt:
        processes.end(list(processes.descendants()))
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        processes.end(list(processes.descendants()))
    print(f"\n{table(rows, [fault.name for fault in FAULTS])}\n")
    # What there was no time for is no claim that failed. The first fault is tried in any case.
    wrong = broken(rows, [claim for claim in CLAIMS if claim.fault in matrix.tried], OURS, TORCHRUN)
    for sentence in wrong:
        print(f"claim broken: {sentence}")
    if wrong:
        print(f"what the contenders wrote is in {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    if left := [fault.name for fault in FAULTS if fault.name not in matrix.tried]:
        print(f"left out for want of time, which --minutes gives: {', '.join(left)}")
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
    tried: list[str] = field(default_factory=list)  # faults

    def run(self, yardstick: Yardstick) -> list[Row]:
        """Fault by fault, so that whatever time there is, the first rows are whole."""
        from tests.support.bed import Bed

        def drills_of(contender: Contender) -> Drills:
            return Drills(contender, self._say, self._pace(contender.folder.name), yardstick)

        # To compare with at the end. Not at the start, where on a busy machine they would take the time of the faults.
        references = [
            drills_of(contenders.ours_undisturbed(self.words, self.folder)),
            drills_of(contenders.baseline_undisturbed(self._job("baseline-undisturbed"))),
        ]
        undisturbed = references[1].contender.folder
        self._say("two Ray clusters of two nodes start")
        bed, other_bed = Bed(2), Bed(2)
        ours = drills_of(contenders.ours(self.words, self.folder, bed, str(self._pace(OURS))))
        # torchrun before ours, which is measured by it.
        rivals = [
            drills_of(contenders.torchrun(self._job("torchrun", SNAPSHOT_STEPS))),
            drills_of(contenders.ray_train(self._job("ray-train", SNAPSHOT_STEPS), other_bed)),
        ]
        order = [rivals[0], ours, rivals[1]]
        self._say(f"all start: {', '.join(each.contender.name for each in order)}")
        for each in order:
            each.begin()
        for each in order:
            each.ready()
        for fault in FAULTS:
            if self.tried and time.time() > self.until_s:
                break
            self.tried.append(fault.name)
            for each in order:  # what is begun is done with all of them
                each.drill(fault, partial(self._is_near, rivals[0]) if each is ours else lambda _: False)
        self._say("undisturbed runs to compare with, then all go on to their end")
        for each in references:
            each.contender.start()
        for each in references:
            if not each.finish():
                raise TrainingError(f"the undisturbed run failed: see {each.contender.folder}.log")
        mine, alone = (partial(committed_weights, self.folder / name, NUM_STEPS) for name in (OURS, "undisturbed"))
        rows = ours.end(partial(planned_lines, self.config, NUM_STEPS), partial(_equal, alone, mine))
        for rival in rivals:
            rows += self._end(rival, undisturbed)
        for other in (
            contenders.ray_train(self._job("ray-train-notice", SNAPSHOT_STEPS), other_bed, "notice"),
            contenders.torchrun_by_default(self._job("torchrun-defaults")),
            contenders.ray_train(self._job("ray-train-defaults"), other_bed, "default"),
        ):
            rows += self._alone(drills_of(other), undisturbed)
        return rows

    def _is_near(self, torchruns: Drills, row: Row) -> bool:
        """Return whether a row of ours breaks a claim by its stall alone, which a busy machine may have made long."""
        claims = [claim for claim in CLAIMS if claim.fault == row.fault]
        known = replace(row, strayed=0, equal=True)  # known at the end only
        beside = [torchruns.last] if torchruns.last else []
        return only_stalls(broken([known, *beside], claims, OURS, TORCHRUN))

    def _alone(self, drills: Drills, undisturbed: Path) -> list[Row]:
        """Start a contender for its few faults, if there is time."""
        if time.time() < self.until_s:
            if drills.contender.bed:
                drills.contender.restore_nodes(2)
            drills.begin()
            drills.ready()
            for fault in drills.contender.faults:
                drills.drill(fault)
        return self._end(drills, undisturbed)

    def _end(self, rival: Drills, undisturbed: Path) -> list[Row]:
        equal = partial(_equal, partial(final_weights, undisturbed), partial(final_weights, rival.contender.folder))
        return rival.end(partial(_committed, undisturbed), equal)

    def _say(self, text: str) -> None:
        now_s = time.time()
        left_s = max(0.0, self.until_s - now_s)
        print(f"{now_s - self.began_s:4.0f} s, {left_s:3.0f} s left for faults | {text}", flush=True)

    def _pace(self, name: str) -> Path:
        return self.folder / f"pace-{name}"

    def _job(self, name: str, snapshot_steps: int = 0) -> Path:
        path = self.folder / f"{name}.job"
        job = Job(self.config, self.folder / name, snapshot_steps, str(self._pace(name)))
        path.write_bytes(pickle.dumps(job))
        return path


def planned_lines(config: Config, num_steps: int) -> dict[int, Line]:
    """Return what the ledger of ours has to say, from the seed alone."""
    size, seed = config.batch.global_size, config.run.seed
    order = SampleOrder(len(build_dataset(config.data)), config.data.held_out_fraction, seed)
    lines = {}
    for step in range(1, num_steps + 1):
        positions = np.arange((step - 1) * size, step * size)
        digest = samples_digest(order.train(positions), positions, seed)
        lines[step] = {"step": step, "num_samples": size, "samples_digest": f"{digest:016x}"}
    return lines


def committed_weights(folder: Path, num_steps: int) -> dict[str, Tensor]:
    """Return the weights of the last checkpoint of one of our runs."""
    return read_whole(Catalog(LocalStore(folder)), num_steps)


def final_weights(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = torch.load(folder / "final.pt")
    return weights


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return float(max((value - other[name]).abs().max().item() for name, value in one.items()))


def _equal(one: Callable[[], dict[str, Tensor]], other: Callable[[], dict[str, Tensor]]) -> bool:
    return largest_difference(one(), other()) <= _EQUAL


def _committed(folder: Path) -> dict[int, Line]:
    return History(Stream(folder / "steps.jsonl").read()).committed
