"""Some optimizer steps by hand, without the loop around them: any shares that a plan allows."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from steadfast.config import Config
from steadfast.data import Fetched
from steadfast.loop.worker_state import WorkerState
from steadfast.parallel import Parallel, arrange, build_parallel
from steadfast.plan import Plan, even_shares
from steadfast.step import global_step
from steadfast.step.stepper import Stepper
from steadfast.world.control import StepResult
from steadfast.world.groups import WorldRank
from steadfast.world.runtime import WorkerProcess, World, form_world
from tests.support.gang import Gang, Member
from tests.support.reference import CPU


class Stepped(NamedTuple):
    """weights: whole, as the first rank that holds each has it. samples, digests: of each step, summed over ranks."""

    weights: dict[str, Tensor]
    losses: list[float]
    num_samples: list[int]
    digests: list[int]


def take_steps(gang: Gang, attempt: int, config: Config, shares: tuple[int, ...]) -> Stepped:
    """All steps of the run by as many workers as there are shares, each of which may have several stages. `attempt` is
    another number at each call."""
    size = len(shares) * config.parallel.ranks_per_sample
    answers = gang.run(_work, attempt, config, shares)[:size]
    by_step = list(zip(*(results for _, results in answers), strict=True))
    return Stepped(
        weights={name: tensor for weights, _ in reversed(answers) for name, tensor in weights.items()},
        losses=[float(sum(r.numbers[0] for r in each) / sum(r.numbers[1] for r in each)) for each in by_step],
        num_samples=[sum(result.num_samples for result in each) for each in by_step],
        digests=[sum(result.samples_digest for result in each) % 2**64 for each in by_step],
    )


def _work(member: Member, attempt: int, config: Config, shares: tuple[int, ...]) -> object:
    size = len(shares) * config.parallel.ranks_per_sample
    if member.number >= size:
        return None
    world = form_world(member.store, WorldRank(member.number, size, attempt), WorkerProcess(CPU))
    try:
        return _steps(world, config, shares)
    finally:
        world.groups.destroy()


def _steps(world: World, config: Config, shares: tuple[int, ...]) -> tuple[dict[str, Tensor], list[StepResult]]:
    model, results = train_by_hand(world, config, shares)
    whole = StateDictOptions(full_state_dict=True)
    weights: dict[str, Any] = get_model_state_dict(model, options=whole)
    return weights, results


def train_by_hand(
    world: World, config: Config, shares: tuple[int, ...], worker: WorkerState | None = None
) -> tuple[nn.Module, list[StepResult]]:
    """Take all steps of the run as a worker of `world`. A collective. Return the model and what the steps gave."""
    worker = worker or WorkerState(config, CPU)
    world = arrange(world, config.parallel)
    parallel = build_parallel(config.parallel, world, worker.precision)
    stepper, batches = build_stepper(world, config, worker, parallel, shares)
    assert not worker.compiled.refused
    results = [stepper.step(step, batches) for step in range(1, worker.num_steps + 1)]
    assert next(batches, None) is None, "microbatches were left over"
    return parallel.unwrap(stepper.model), results


def build_stepper(
    world: World, config: Config, worker: WorkerState, parallel: Parallel, shares: tuple[int, ...] | None = None
) -> tuple[Stepper, Iterator[Fetched]]:
    """Return what takes the steps of the run, and its batches; shares are even if none are given. A collective."""
    batch = config.batch
    num_samples = config.run.num_samples(worker.order.num_train)
    shares = shares or even_shares(batch.num_microbatches, world.data_size)
    plan = Plan(batch.global_size, batch.samples_per_microbatch, shares, world.shard_size, num_samples)
    model, _ = worker.prepare(world, parallel)
    worker.load_initial()
    stepper = global_step.build_stepper(worker, worker.task, world, plan, parallel, model)
    return stepper, worker.loader.steps(plan.stream(world.data_rank, 1, worker.num_steps))
