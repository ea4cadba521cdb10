"""What a run computes, said as plainly as possible: one process, the whole global batch, float64."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import default_collate

from steadfast.config import AdamWConfig, Config, OptimizerConfig, SgdConfig, TargetOptimizer
from steadfast.config.target import load_target
from steadfast.data import Extent, SampleOrder, build_dataset, build_order
from steadfast.data.batches import Batch, map_tensors
from steadfast.data.datasets import build_collate
from steadfast.data.order import sample_keys
from steadfast.loop.seed import seed_generators, seed_validation
from steadfast.models import build_model
from steadfast.optim.schedule import learning_rate
from steadfast.parallel.blocks import stop_caching
from steadfast.plan import Microbatch
from steadfast.tasks import build_task
from tests.support.orders import samples_digest

CPU = torch.device("cpu")


class Reference(NamedTuple):
    """What a run should come to: its weights in the end, and each step's loss, samples and their digest."""

    weights: dict[str, Tensor]
    losses: list[float | None]
    num_samples: list[int]
    digests: list[int]
    validation_loss: float


class GlobalBatch(NamedTuple):
    """The samples of a step, and where in the stream they stand."""

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]


def reference(
    config: Config,
    skip: frozenset[int] = frozenset(),
    ended_at: Sequence[int] = (),
    before_step: Callable[[nn.Module, int], None] = lambda model, step: None,
) -> Reference:
    """The run that the configuration describes, done the plain way; steps to skip are as if they had never been.

    Args:
        ended_at: the epochs with which the run ended before it was extended.
        before_step: called with the model and the number of each step before the step begins, as a hook might be.
    """
    torch.manual_seed(config.run.seed)
    model = build_model(config.model).double()
    if config.data.has_documents:
        stop_caching(model)
    optimizer = _optimizer(config.optimizer, model)

    losses: list[float | None] = []
    batches = global_batches(config, ended_at)
    for step, global_batch in enumerate(batches, 1):
        if step in skip:
            losses.append(None)
            continue
        before_step(model, step)
        loss = mean_loss(model, global_batch, config, step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.max_grad_norm or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.schedule, config.optimizer.lr, step, len(batches))
        optimizer.step()
        losses.append(loss.item())
    return Reference(
        model.state_dict(),
        losses,
        num_samples=[0 if step in skip else len(each.ids) for step, each in enumerate(batches, 1)],
        digests=[samples_digest(*each, config.run.seed) for each in batches],
        validation_loss=mean_loss(model.eval(), held_out(config), config).item(),
    )


def expected_ledger(config: Config) -> Reference:
    """Only what the ledger should say, for samples that need more than `microbatches` to be read."""
    batches = global_batches(config)
    num_samples = [len(each.ids) for each in batches]
    digests = [samples_digest(*each, config.run.seed) for each in batches]
    return Reference({}, [None] * len(batches), num_samples, digests, validation_loss=math.nan)


def _optimizer(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    if isinstance(config, TargetOptimizer):
        optimizer: torch.optim.Optimizer = load_target(config.target)(model.parameters(), lr=config.lr, **config.args)
        return optimizer
    assert isinstance(config, AdamWConfig | SgdConfig)
    matrices = {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": config.weight_decay}
    others = {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}
    if isinstance(config, SgdConfig):
        return torch.optim.SGD([matrices, others], momentum=config.momentum, nesterov=config.nesterov)
    return torch.optim.AdamW([matrices, others], betas=config.betas, eps=config.eps)


def mean_loss(model: nn.Module, batch: GlobalBatch, config: Config, step: int | None = None) -> Tensor:
    """The sum of all losses, divided once by the count of all. Each microbatch of a step draws numbers of its own, and
    so does each of validation, where `step` is None."""
    task = build_task(config.task)
    loss_sum, count = torch.zeros((), dtype=torch.float64), 0
    for index, microbatch in enumerate(microbatches(batch, config)):
        if step is None:
            start = index * config.batch.samples_per_microbatch
            seed_validation(config.run.seed, Microbatch(1, index, start, 0), CPU)
        else:
            seed_generators(config.run.seed, Microbatch(step, index, 0, 0), CPU)
        sums = task.loss(model, microbatch)
        loss_sum, count = loss_sum + sums.loss_sum, count + int(sums.count)
    return loss_sum / count


def order_of(config: Config) -> SampleOrder:
    return build_order(config.data, Extent.of(build_dataset(config.data)), config.run.seed)


def global_batches(config: Config, ended_at: Sequence[int] = ()) -> list[GlobalBatch]:
    """What each step of the run is made of."""
    order, size = order_of(config), config.batch.global_size
    end = (config.run.steps or 0) * size or (config.run.epochs or 0) * order.num_train
    parts: list[NDArray[np.int64]] = []
    begin = 0
    for stop in [*(epochs * order.num_train for epochs in ended_at), end]:
        parts += np.split(np.arange(begin, stop), range(size, stop - begin, size))
        begin = stop
    return [GlobalBatch(order.train(positions), positions) for positions in parts]


def held_out(config: Config) -> GlobalBatch:
    order = order_of(config)
    positions = np.arange(order.num_validation)
    if not order.num_validation:
        return GlobalBatch(positions, positions)
    return GlobalBatch(order.validation(positions), positions)


def microbatches(global_batch: GlobalBatch, config: Config) -> Iterator[Batch]:
    """Its samples, each read with the randomness that is its own."""
    dataset = build_dataset(config.data)
    keys = sample_keys(*global_batch, config.run.seed)
    samples = []
    for sample, key in zip(global_batch.ids.tolist(), keys.tolist(), strict=True):
        torch.default_generator.manual_seed(key)
        samples.append(dataset[sample])
    size = config.batch.samples_per_microbatch
    collate = build_collate(config.data, "data.collate", dataset) or default_collate
    for start in range(0, len(samples), size):
        batch = collate(samples[start : start + size])
        yield map_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, batch)
