"""Three ways to save one state while training waits as little as it can: ours, DCP's and the one of Ray Train's guides.

All of them are plain Python in one process, so they take turns in it: `worker` is the function of a TorchTrainer.
"""

import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, cast

import ray.train
import torch
import torch.distributed.checkpoint as dcp
from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from steadfast.checkpoint.catalog import Catalog
from steadfast.checkpoint.durable import Checkpoints, Fingerprints
from steadfast.checkpoint.shards import StagingBuffer
from steadfast.checkpoint.state import NamedOptimizer, app_state, flatten
from steadfast.checkpoint.writer import Writer
from steadfast.config import Config, DdpConfig, GptConfig
from steadfast.models.gpt import Gpt
from steadfast.optim.optimizer import build_optimizer
from steadfast.parallel.precision import Precision
from steadfast.parallel.replicated import ReplicatedParallelism
from steadfast.run import events
from steadfast.storage import LocalStore
from steadfast.world.groups import Groups
from steadfast.world.runtime import World
from tests.benchmarks.commands import ROOT

_LIMIT_S = 120.0
_POLL_S = 2.5  # Ray Train's controller fetches reports every 2 s

Settings = dict[str, Any]
Blocked = dict[str, list[float]]  # seconds of each round, by contender


class Training:
    """What there is to save: a GPT and AdamW's state, as after some steps."""

    def __init__(self, model: dict[str, Any]) -> None:
        self.model = Gpt(GptConfig(**model))
        self.optimizer = build_optimizer(Config().optimizer, self.model)
        self.state = app_state({"model": self.model, "optimizer": NamedOptimizer(self.model, self.optimizer)})
        for tensor in flatten(self.state).values():
            tensor.detach().normal_()

    @property
    def num_params(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in flatten(self.state).values())

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class Saver(Protocol):
    def save(self) -> float:
        """The seconds in which training waits. What was saved before has settled."""
        ...

    def settle(self) -> object:
        """Until nothing of the last call is under way any more."""
        ...


class Ours:
    """As train.py does it: the state is referred to once, each save copies it. A world of one needs no groups."""

    def __init__(self, training: Training, folder: Path) -> None:
        self._training, self._step = training, 0
        self.writer = Writer()
        world = World(0, 1, 1, cast(Groups, None))
        parallel = ReplicatedParallelism(DdpConfig(), world, Precision(torch.device("cpu")))
        self._checkpoints = Checkpoints(Catalog(LocalStore(folder)), world, parallel, self.writer, Fingerprints(""))

    def save(self) -> float:
        self._step += 1
        began = time.perf_counter()
        self._checkpoints.save(self._step, self._training.state, {})
        return time.perf_counter() - began

    def settle(self) -> None:
        """Until what it replaces has been deleted as well."""
        self._checkpoints.wait_for_commit(_LIMIT_S)
        [news] = self._checkpoints.news()
        if not isinstance(news, events.Checkpoint):
            raise RuntimeError(news.line())


class OursInNewMemory:
    """Each save is the first one of a process: into memory that the kernel has yet to find."""

    def __init__(self, ours: Ours) -> None:
        self._ours, self.settle = ours, ours.settle

    def save(self) -> float:
        self._ours.writer._buffers = (StagingBuffer(), StagingBuffer())
        return self._ours.save()


class Dcp:
    """`async_save` as its tutorial has it, without a stager of one's own."""

    def __init__(self, training: Training, folder: Path) -> None:
        self._training, self._folder = training, folder
        self._future: Future[Any] | None = None

    def save(self) -> float:
        began = time.perf_counter()
        self._future = cast(Future[Any], dcp.async_save(self._training.state_dict(), checkpoint_id=self._folder))
        return time.perf_counter() - began

    def settle(self) -> None:
        assert self._future
        self._future.result()
        shutil.rmtree(self._folder)


class Stock:
    """`torch.save` into a temporary folder, and `report`. It does not begin before the report of the last one has been
    fetched: a wait that somebody who saves every few seconds would not have."""

    def __init__(self, training: Training) -> None:
        self._training, self._reported = training, 0.0

    def save(self) -> float:
        time.sleep(max(0.0, self._reported + _POLL_S - time.perf_counter()))
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            torch.save(self._training.state_dict(), Path(folder) / "state.pt")
            ray.train.report({}, checkpoint=Checkpoint.from_directory(folder))
            self._reported = time.perf_counter()
        return self._reported - began

    def settle(self) -> None:
        """All of it was in `save`, but for what the page cache holds."""


def take_rounds(savers: dict[str, Saver], num_rounds: int) -> Blocked:
    """Each saver once a round, in reversed order every other time. The first round is the first one of the process."""
    blocked: Blocked = {name: [] for name in savers}
    for turn in range(num_rounds):
        for name in list(savers)[:: 1 if turn % 2 == 0 else -1]:
            os.sync()  # nobody pays for the pages that another has left dirty
            blocked[name].append(savers[name].save())
            savers[name].settle()
    return blocked


def worker(settings: Settings) -> None:
    """All contenders, for one model after the other."""
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
    measured = []
    folder = Path(settings["folder"])
    for name, (model, num_pairs) in settings["cases"].items():
        training = Training(model)
        ours = Ours(training, folder / f"ours-{name}")
        savers: dict[str, Saver] = {
            "ours": ours,
            "control": ours,
            "new memory": OursInNewMemory(ours),
            "DCP async_save": Dcp(training, folder / "dcp"),
            "torch.save + report": Stock(training),
        }
        blocked = take_rounds(savers, num_pairs + 1)
        measured.append([name, training.num_params, training.num_bytes, blocked])
        shutil.rmtree(folder / f"ours-{name}")
    (folder / "blocked.json").write_text(json.dumps(measured))


def run_in_ray_train(cases: dict[str, tuple[dict[str, Any], int]], folder: Path) -> Sequence[tuple[Any, ...]]:
    """(case, parameters, bytes of the state, seconds by contender), one for each case of (model, pairs). In a Ray of
    its own, below `folder`."""
    home = folder / "home"
    home.mkdir()
    own = {"HOME": str(home), "RAY_TMPDIR": str(folder), "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    os.environ |= {**own, "RAY_USAGE_STATS_ENABLED": "0"}
    ray.init(address="local", include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    try:
        TorchTrainer(
            worker,
            train_loop_config={"cases": cases, "folder": str(folder)},
            scaling_config=ScalingConfig(num_workers=1),
            run_config=RunConfig(
                name="stock",
                storage_path=str(folder / "storage"),
                checkpoint_config=CheckpointConfig(num_to_keep=Config().checkpoint.keep_last),
            ),
        ).fit()
    finally:
        ray.shutdown()
    return cast(Sequence[tuple[Any, ...]], json.loads((folder / "blocked.json").read_text()))
