"""The torchrun baseline, after PyTorch's tutorial on fault tolerance: `torchrun ... -m tests.chaos.torchrun_loop`."""

import os
import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.chaos.loop import Job, State, train


def main(job_file: str) -> None:
    job: Job = pickle.loads(Path(job_file).read_bytes())
    snapshot = job.folder / "snapshot.pt"
    dist.init_process_group("gloo")

    def save(state: State) -> None:
        if dist.get_rank() == 0:
            torch.save(state, snapshot.with_suffix(".new"))
            os.replace(snapshot.with_suffix(".new"), snapshot)

    def wrap(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
        return DistributedDataParallel(model, process_group=group)

    train(job, wrap, torch.load(snapshot) if snapshot.exists() else None, save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
