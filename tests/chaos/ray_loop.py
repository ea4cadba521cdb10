"""The Ray Train baseline, after its guides on fault tolerance and elastic training, with the stock controller.

`python -m tests.chaos.ray_loop JOB ADDRESS recommended|default|notice|torchft`. Recommended: elastic between 1 and 3
workers, any number of failures, a checkpoint reported every few steps. Default: two workers, no failure survived, no
checkpoint. Notice: as recommended, with a checkpoint when a node is about to go. torchft: two replica groups of one
worker, each of which is restarted alone, with torchft's loop.
"""

import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from ray.train.v2.torch.torchft_config import TorchftConfig
from torch import nn

from tests.chaos import torchft_loop
from tests.chaos.contenders import LIGHTHOUSE
from tests.chaos.loop import Job, State, train
from tests.chaos.matrix import LIMIT_S


def train_loop(settings: dict[str, Any]) -> None:
    if settings["has_replica_groups"]:
        torchft_loop.train(settings["job"], ray.train.get_context().get_world_rank())
        return
    restored = None
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            restored = torch.load(Path(folder) / "state.pt")

    def save(state: State) -> None:
        with tempfile.TemporaryDirectory() as folder:
            mine = None
            if ray.train.get_context().get_world_rank() == 0:
                torch.save(state, Path(folder) / "state.pt")
                mine = Checkpoint.from_directory(folder)
            ray.train.report({"step": state["step"]}, checkpoint=mine)

    def wrap(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
        wrapped: nn.Module = prepare_model(model, parallel_strategy_kwargs={"process_group": group})
        return wrapped

    told = False

    def noticed() -> bool:
        """As Ray's documentation has it: a checkpoint of its own once a preemption is announced."""
        nonlocal told
        if told or not settings["heeds_notice"] or ray.train.get_preemption_info() is None:
            return False
        told = True
        return True

    train(settings["job"], wrap, restored, save, noticed)


def main(job_file: str, address: str, settings: str) -> None:
    job: Job = pickle.loads(Path(job_file).read_bytes())
    tuned, grouped = settings != "default", settings == "torchft"
    # What the controller reads, and Ray does not hand on to it: a worker that is silent cannot leave its group either.
    patience = {"TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": str(LIMIT_S)} if tuned else {}
    ray.init(address=address, log_to_driver=False, runtime_env={"env_vars": patience})
    TorchTrainer(
        train_loop,
        train_loop_config={"job": job, "heeds_notice": settings == "notice", "has_replica_groups": grouped},
        torch_config=TorchftConfig(lighthouse_kwargs=LIGHTHOUSE, backend="gloo") if grouped else None,
        scaling_config=ScalingConfig(
            num_workers=(1, 3) if tuned and not grouped else 2,
            resources_per_worker={"CPU": 1, "node": 1},
            elastic_resize_monitor_interval_s=1.0 if tuned else 60.0,
        ),
        run_config=RunConfig(
            name="run",
            storage_path=str(job.folder / "storage"),
            failure_config=FailureConfig(max_failures=-1 if tuned else 0),
        ),
    ).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
