"""The peer: a training loop for torchrun as a good engineer writes it by hand, with DDP or FSDP2, and nothing else.

torchrun --standalone --nproc-per-node 2 -m tests.benchmarks.straight_loop --config FILE

Model, data, batch, optimizer, schedule, `parallel.kind` and `compile` are those of the app's configuration file. No
fault tolerance, no ledger, no checkpoint, no metrics but a printed loss.
"""

import argparse
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from steadfast.config import AdamWConfig, Config, CosineConfig, FsdpConfig, GptConfig, TextData, load_config
from steadfast.data.datasets import TextDataset
from steadfast.models.gpt import Gpt
from tests.benchmarks.turns import Turns


def main() -> None:
    options = arguments()
    config: Config = load_config(options.config, [])
    assert isinstance(config.model, GptConfig)
    assert isinstance(config.data, TextData)
    assert isinstance(config.schedule, CosineConfig)
    assert isinstance(config.optimizer, AdamWConfig)
    num_steps = config.run.steps or 0
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    turns = Turns(options.turns, options.side, rank, options.block, options.blocks) if options.turns else None

    torch.manual_seed(config.run.seed)
    model = wrap(config)
    optimizer = build_optimizer(config.optimizer, model)
    data = TextDataset(config.data.source, config.data.context_length)
    batches = stream(data, config.batch.samples_per_microbatch, rank, world_size, config.run.seed)
    num_forwards = config.batch.global_size // (config.batch.samples_per_microbatch * world_size)

    for step in range(1, num_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.schedule, config.optimizer.lr, step, num_steps)
        total = torch.zeros(())
        for index in range(num_forwards):
            inputs, targets = next(batches)
            if turns and index == 0:
                turns.step_begins()
            with without_sum(model) if index < num_forwards - 1 else nullcontext():
                loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / num_forwards
                loss.backward()
            total += loss.detach()
        if config.optimizer.max_grad_norm:
            nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == 1 and rank == 0 and options.first_step:
            Path(options.first_step).write_text(str(time.time()))
        if step % 10 == 0 and rank == 0:
            print(f"step {step} | loss {total.item():.3f}", flush=True)
    dist.destroy_process_group()


def wrap(config: Config) -> nn.Module:
    """Return the model that is trained, over all ranks."""
    assert isinstance(config.model, GptConfig)
    model = Gpt(config.model)
    if config.compile == "blocks":
        for block in model.blocks():
            block.compile(dynamic=False)
    if not isinstance(config.parallel, FsdpConfig):
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    for part in (*model.blocks(), model):
        fully_shard(part)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gloo cannot average
    return model


@contextmanager
def without_sum(model: nn.Module) -> Iterator[None]:
    """Return the context of a microbatch that is not a step's last one."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
        return
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def build_optimizer(config: AdamWConfig, model: nn.Module) -> torch.optim.AdamW:
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)


def learning_rate(config: CosineConfig, peak: float, step: int, num_steps: int) -> float:
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    floor = peak * config.min_lr_fraction
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * done))


def stream(data: TextDataset, size: int, rank: int, world_size: int, seed: int) -> Iterator[tuple[Tensor, ...]]:
    """Epoch after epoch in random order, this rank's every `world_size`-th sample; one gather for each microbatch."""
    random = np.random.default_rng(seed)
    while True:
        ids = random.permutation(len(data))[rank::world_size]
        for start in range(0, len(ids) - size + 1, size):
            yield data.read_batch(ids[start : start + size])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--first-step", help="file for the time at which the first step ended")
    parser.add_argument("--turns", help="folder through which turns are taken")
    parser.add_argument("--side", default="peer")
    parser.add_argument("--block", type=int, default=1, help="steps in a turn")
    parser.add_argument("--blocks", type=int, default=0, help="turns, the warm-up included")
    return parser.parse_args()


if __name__ == "__main__":
    main()
