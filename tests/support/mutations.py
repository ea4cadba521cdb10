"""The code, broken on purpose: each function breaks one thing in the process that calls it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import steadfast.checkpoint.durable
import steadfast.checkpoint.restore
import steadfast.checkpoint.snapshots
import steadfast.loop.validate
import steadfast.parallel.buckets
import steadfast.parallel.ddp
import steadfast.parallel.pipeline
import steadfast.step.stepper
import steadfast.worker
import steadfast.world.clock
from steadfast.balance.shares import SpeedBalance
from steadfast.checkpoint.shards import Shard
from steadfast.data.order import Int64s, SampleOrder
from steadfast.loop.totals import Totals
from steadfast.parallel.buckets import PlainSum
from steadfast.parallel.fixed_point import FixedPoint
from steadfast.plan import Plan
from steadfast.tasks import LanguageModeling, Sums
from tests.support.small import Tokens

# Positions of the small run, both of its third step; with three workers, one is the first's and one the last's.
EARLY, LATE = 26, 38


def _replace(owner: Any, name: str, broken: Callable[..., Any]) -> None:
    """Put `broken` in the place of a function. Its first argument is the honest one."""
    honest = getattr(owner, name)

    def replaced(*args: Any, **named: Any) -> Any:
        return broken(honest, *args, **named)

    setattr(owner, name, replaced)


def nothing() -> None:
    """The code as it is."""


def _read_elsewhere(places: dict[int, int]) -> None:
    """At each position that is named, the sample of another."""

    def train(honest: Any, self: SampleOrder, positions: Int64s) -> Any:
        wanted = positions.copy()
        for position, other in places.items():
            wanted[positions == position] = other
        return honest(self, wanted)

    _replace(SampleOrder, "train", train)


def repeat_a_sample() -> None:
    _read_elsewhere({EARLY: LATE})


def swap_two_samples_across_ranks() -> None:
    _read_elsewhere({EARLY: LATE, LATE: EARLY})


def read_another_sample_than_is_said() -> None:
    _replace(Tokens, "__getitem__", lambda honest, self, index: honest(self, index // 2))


def drop_a_microbatch() -> None:
    def microbatch(honest: Any, self: Plan, step: int, index: int) -> Any:
        found = honest(self, step, index)
        return found._replace(weight=0) if (step, index) == (3, 4) else found

    _replace(Plan, "_microbatch", microbatch)


def count_pads() -> None:
    _replace(Plan, "_pad", lambda honest, *place: honest(*place)._replace(weight=1))


def key_dropout_by_rank() -> None:
    _replace(
        steadfast.step.stepper,
        "seed_generators",
        lambda honest, seed, *rest: honest(seed + dist.get_rank(), *rest),
    )


def leave_generators_as_they_are() -> None:
    """Have a stage draw from the generators as they are after its own forward, not after the stage before."""
    _replace(steadfast.parallel.pipeline, "set_generators", lambda honest, device, state: None)


def take_means_before_the_sum() -> None:
    def loss(honest: Any, self: LanguageModeling, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums:
        sums: Sums = honest(self, model, batch)
        return Sums(sums.loss_sum / max(1, int(sums.count)), 1)

    _replace(LanguageModeling, "loss", loss)


def broadcast_from_rank_0() -> None:
    _replace(steadfast.checkpoint.restore, "broadcast", lambda honest, state, source, groups: honest(state, 0, groups))


def broadcast_no_optimizer() -> None:
    def broadcast(honest: Any, state: Any, *rest: Any) -> Any:
        return honest({"model": state["model"]}, *rest)

    _replace(steadfast.checkpoint.restore, "broadcast", broadcast)


def load_no_optimizer() -> None:
    def elsewhere(shard: Shard) -> Shard:
        return replace(shard, tensor=shard.tensor.clone()) if shard.name.startswith("optimizer.") else shard

    for module in (steadfast.checkpoint.durable, steadfast.checkpoint.snapshots):
        _replace(
            module,
            "load_shards",
            lambda honest, files, shards, **how: honest(files, list(map(elsewhere, shards)), **how),
        )


def find_no_unused_parameters() -> None:
    def init(honest: Any, self: Any, model: nn.Module, **how: Any) -> None:
        honest(self, model, **{**how, "find_unused_parameters": False})

    _replace(steadfast.parallel.ddp._Transparent, "__init__", init)


def refuse_to_take_times() -> None:
    def mark(*_: Any) -> None:
        raise AssertionError("nobody asked for the time of a microbatch")

    _replace(steadfast.world.clock.HostClock, "mark", mark)


def forget_what_loaders_have_read() -> None:
    def init(honest: Any, self: SpeedBalance, plan: Plan, num_ahead: int, *rest: Any) -> None:
        honest(self, plan, 0, *rest)

    _replace(SpeedBalance, "__init__", init)


def add_gradients_as_floats() -> None:
    _replace(steadfast.parallel.buckets, "FixedPointSum", lambda honest, fixed_point: PlainSum())


def add_losses_as_floats() -> None:
    for module in (steadfast.step.stepper, steadfast.loop.validate):
        _replace(module, "totals_of", lambda honest, exact: Totals)


def keep_gathered_weights_over_the_update() -> None:
    _replace(FSDPModule, "set_reshard_after_backward", lambda honest, self, _: honest(self, False))


def take_the_unit_from_the_world() -> None:
    def add(honest: Any, self: FixedPoint, total: Tensor, gradient: Tensor, first: bool) -> None:
        if self._scale is None:
            honest(self, total, gradient.clone(), True)
            assert self._scale is not None
            self._scale = self._scale / 8 ** dist.get_world_size()
        honest(self, total, gradient, first)

    _replace(FixedPoint, "add", add)


def begin_with_threads(num_threads: int) -> None:
    """As the environment of a machine may have it."""
    torch.set_num_threads(num_threads)


def leave_the_number_of_threads(num_threads: int) -> None:
    """To the environment."""

    def set_numerics(honest: Any, tf32: bool, deterministic: bool, _: int | None) -> None:
        honest(tf32, deterministic)
        torch.set_num_threads(num_threads)

    _replace(steadfast.worker, "set_numerics", set_numerics)
