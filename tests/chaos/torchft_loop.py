"""The loop of torchft and of Ray Train's `TorchftConfig`, after the examples of both.

`torchrun ... -m tests.chaos.torchft_loop JOB GROUP` is one replica group of one worker. The share of a group does not
depend on how many groups are alive, as with torchft's `DistributedSampler`: samples of a group that is away are lost.
"""

import os
import pickle
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DistributedSampler

from steadfast.config import TextData
from steadfast.data.datasets import TextDataset
from steadfast.storage.jsonl import FileStream
from tests.chaos.loop import Job, add_gradients, build
from tests.chaos.matrix import LIMIT_S

NUM_GROUPS = 2


def train(job: Job, group: int) -> None:
    """Train as the replica group `group`, from the newest snapshot or the state of a living group."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    config = job.config
    assert isinstance(config.data, TextData)
    limit = timedelta(seconds=LIMIT_S)
    module, adamw = build(config)

    def state() -> dict[str, Any]:
        return {"model": module.state_dict(), "optimizer": adamw.state_dict()}

    def load(given: dict[str, Any]) -> None:
        module.load_state_dict(given["model"])
        adamw.load_state_dict(given["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=state,
        world_size=1,
        rank=0,
        replica_id=f"group_{group}",
        timeout=limit,
        init_sync=False,  # all groups have the same weights by the seed
    )
    snapshot = job.folder / "snapshot.pt"
    if snapshot.exists():
        saved = torch.load(snapshot)
        load(saved)
        manager.load_state_dict(saved["manager"])
    model: nn.Module = DistributedDataParallel(manager, module)
    optimizer = Optimizer(manager, adamw)

    data = TextDataset(config.data.source, config.data.context_length)
    sampler: DistributedSampler[Any] = DistributedSampler(
        data,  # type: ignore[arg-type]
        num_replicas=1,
        rank=0,
        seed=config.run.seed,
        drop_last=True,
    )
    size, share = config.batch.global_size, config.batch.global_size // NUM_GROUPS
    steps_per_epoch = len(sampler) // size
    ledger = FileStream(job.folder / "steps.jsonl")
    quorum, attempt = -1, 0.0
    while (step := manager.current_step()) < (config.run.steps or 0):
        epoch, done = divmod(step, steps_per_epoch)
        sampler.set_epoch(epoch)
        batch = torch.tensor(list(sampler)[done * size : (done + 1) * size])
        ids = batch[group::NUM_GROUPS]
        optimizer.zero_grad()
        add_gradients(job, model, data, ids)
        # A sum, in which each group that takes part has its own places. An error in the sum leaves the step undone.
        used = torch.zeros(NUM_GROUPS, share, dtype=torch.float64)
        agreed = torch.zeros(1, dtype=torch.float64)
        if manager.is_participating():
            used[group] = ids + 1.0
        if manager.participating_rank() == 0:
            if manager._quorum_id != quorum:
                quorum, attempt = manager._quorum_id, time.time()
            agreed[0] = attempt
        for values in (used, agreed):
            manager.allreduce(values, reduce_op=torch.distributed.ReduceOp.SUM).wait()
        optimizer.step()
        if manager.current_step() != step + 1:
            continue
        # Each group writes the line, because another one may die before it does.
        line = {"step": step + 1, "attempt": agreed.item(), "world_size": manager.num_participants()}
        seen = [int(each) - 1 for each in used.flatten() if each > 0]
        ledger.write([{**line, "time_s": time.time(), "ids": seen}])
        if manager.participating_rank() == 0 and job.snapshot_steps and (step + 1) % job.snapshot_steps == 0:
            new = snapshot.with_suffix(".new")
            torch.save({**state(), "manager": manager.state_dict()}, new)
            os.replace(new, snapshot)
    if manager.participating_rank() == 0:
        torch.save(module.state_dict(), job.folder / "final.pt")
    manager.shutdown()


if __name__ == "__main__":
    train(pickle.loads(Path(sys.argv[1]).read_bytes()), int(sys.argv[2]))
