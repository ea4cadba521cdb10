"""The training loop of both baselines: DDP as a good engineer writes it by hand, with what their documentation
recommends. The global batch is divided by the number of workers, a `DistributedSampler` shares out the samples, a
snapshot is taken every few steps, and a start goes on from the newest one, in the middle of an epoch if need be.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DistributedSampler

from steadfast.config import Config, GptConfig, TextData
from steadfast.data.datasets import TextDataset
from steadfast.models.gpt import Gpt
from steadfast.storage.jsonl import FileStream
from tests.chaos.matrix import LIMIT_S
from tests.support.pace import pace

State = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What a baseline trains. `folder` is shared by all workers: steps.jsonl and final.pt are written there.

    snapshot_steps: 0 for none, which is the default of both launchers.
    """

    config: Config
    folder: Path
    snapshot_steps: int
    pace_file: str


def train(
    job: Job,
    wrap: Callable[[nn.Module, dist.ProcessGroup], nn.Module],
    restored: State | None,
    save: Callable[[State], None],
    noticed: Callable[[], bool] = lambda: False,
) -> None:
    """One life of a worker, in the default process group, which its launcher has formed.

    The collectives have a group of their own: a time-out short enough for a silent peer is too short for the slowest
    of several starting processes.

    Args:
        wrap: makes the module data parallel within a group.
        restored: the newest snapshot, None for a start from step 0.
        save: takes a snapshot; called on all ranks at the same step.
        noticed: whether all ranks have just been told that a node goes; called on all of them in each step.
    """
    config = job.config
    assert isinstance(config.data, TextData)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(timeout=timedelta(seconds=LIMIT_S))
    module, optimizer = build(config)
    model = wrap(module, group)
    step = 0
    if restored:
        step = restored["step"]
        module.load_state_dict(restored["model"])
        optimizer.load_state_dict(restored["optimizer"])

    data = TextDataset(config.data.source, config.data.context_length)
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=config.run.seed, drop_last=True)  # type: ignore[arg-type]
    share = config.batch.global_size // world_size
    steps_per_epoch = len(sampler) // share
    attempt, ledger = agreed_time(), FileStream(job.folder / "steps.jsonl")
    while step < (config.run.steps or 0):
        epoch, done = divmod(step, steps_per_epoch)
        sampler.set_epoch(epoch)
        ids = torch.tensor(list(sampler)[done * share : (done + 1) * share])
        add_gradients(job, model, data, ids)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        used = of_all_ranks(ids, group)
        if rank == 0:
            line = {"step": step, "attempt": attempt, "world_size": world_size, "time_s": time.time()}
            ledger.write([{**line, "ids": used.tolist()}])
        told = noticed()
        if (job.snapshot_steps and step % job.snapshot_steps == 0) or told:
            save({"step": step, "model": module.state_dict(), "optimizer": optimizer.state_dict()})
    if rank == 0:
        torch.save(module.state_dict(), job.folder / "final.pt")


def build(config: Config) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model whose weights follow from the seed, and its optimizer."""
    assert isinstance(config.model, GptConfig)
    torch.manual_seed(config.run.seed)
    module = Gpt(config.model).double()
    return module, torch.optim.AdamW(module.parameters(), lr=config.optimizer.lr, betas=config.optimizer.betas)


def add_gradients(job: Job, model: Any, data: TextDataset, ids: Tensor) -> None:
    """Add up the gradients of a worker's samples, which are summed over workers in the last backward, and clip them."""
    parts = ids.split(job.config.batch.microbatch_size)
    for index, part in enumerate(parts):
        pace(job.pace_file, model)
        inputs, targets = data.read_batch(part.numpy())
        with getattr(model, "no_sync", nullcontext)() if index < len(parts) - 1 else nullcontext():
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            (loss * (len(part) / len(ids))).backward()
    if job.config.optimizer.max_grad_norm:
        nn.utils.clip_grad_norm_(model.parameters(), job.config.optimizer.max_grad_norm)


def of_all_ranks(ids: Tensor, group: dist.ProcessGroup) -> Tensor:
    gathered = [torch.empty_like(ids) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, ids, group)
    return torch.cat(gathered)


def agreed_time() -> float:
    """Tells one life of the worker group from the next."""
    now = torch.tensor([time.time()], dtype=torch.float64)
    dist.broadcast(now, src=0)
    return now.item()
