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
from steadfast.plan import Microbatch, Plan
from steadfast.tasks import LanguageModeling, Sums
from tests.support.small import Tokens

# Positions of the small run, both of its third step; with three workers, one is the first's and one the last's.
EARLY, LATE = 26, 38


def _replace(owner: Any, name: str, broken: Callable[[Any], Any]) -> None:
    """`broken` is given the honest function, and answers with the one to put in its place."""
    setattr(owner, name, broken(getattr(owner, name)))


def nothing() -> None:
    """The code as it is."""


def _read_elsewhere(places: dict[int, int]) -> None:
    """At each position that is named, the sample of another."""

    def broken(honest: Any) -> Any:
        def train(self: SampleOrder, positions: Int64s) -> Int64s:
            wanted = positions.copy()
            for position, other in places.items():
                wanted[positions == position] = other
            ids: Int64s = honest(self, wanted)
            return ids

        return train

    _replace(SampleOrder, "train", broken)


def repeat_a_sample() -> None:
    _read_elsewhere({EARLY: LATE})


def swap_two_samples_across_ranks() -> None:
    _read_elsewhere({EARLY: LATE, LATE: EARLY})


def read_another_sample_than_is_said() -> None:
    _replace(Tokens, "__getitem__", lambda honest: lambda self, index: honest(self, index // 2))


def drop_a_microbatch() -> None:
    def broken(honest: Any) -> Any:
        def microbatch(self: Plan, step: int, index: int) -> Microbatch:
            found: Microbatch = honest(self, step, index)
            return found._replace(weight=0) if (step, index) == (3, 4) else found

        return microbatch

    _replace(Plan, "_microbatch", broken)


def count_pads() -> None:
    _replace(Plan, "_pad", lambda honest: lambda *place: honest(*place)._replace(weight=1))


def key_dropout_by_rank() -> None:
    _replace(
        steadfast.step.stepper,
        "seed_generators",
        lambda honest: lambda seed, *rest: honest(seed + dist.get_rank(), *rest),
    )


def leave_generators_as_they_are() -> None:
    """Have a stage draw from the generators as they are after its own forward, not after the stage before."""
    _replace(steadfast.parallel.pipeline, "set_generators", lambda honest: lambda device, state: None)


def take_means_before_the_sum() -> None:
    def broken(honest: Any) -> Any:
        def loss(self: LanguageModeling, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums:
            sums: Sums = honest(self, model, batch)
            return Sums(sums.loss_sum / max(1, int(sums.count)), 1)

        return loss

    _replace(LanguageModeling, "loss", broken)


def broadcast_from_rank_0() -> None:
    _replace(
        steadfast.checkpoint.restore, "broadcast", lambda honest: lambda state, source, groups: honest(state, 0, groups)
    )


def broadcast_no_optimizer() -> None:
    def broken(honest: Any) -> Any:
        return lambda state, source, groups: honest({"model": state["model"]}, source, groups)

    _replace(steadfast.checkpoint.restore, "broadcast", broken)


def load_no_optimizer() -> None:
    def broken(honest: Any) -> Any:
        def elsewhere(shard: Shard) -> Shard:
            return replace(shard, tensor=shard.tensor.clone()) if shard.name.startswith("optimizer.") else shard

        return lambda files, shards, **how: honest(files, list(map(elsewhere, shards)), **how)

    _replace(steadfast.checkpoint.durable, "load_shards", broken)
    _replace(steadfast.checkpoint.snapshots, "load_shards", broken)


def find_no_unused_parameters() -> None:
    def broken(honest: Any) -> Any:
        return lambda self, model, **how: honest(self, model, **{**how, "find_unused_parameters": False})

    _replace(steadfast.parallel.ddp._Transparent, "__init__", broken)


def refuse_to_take_times() -> None:
    def broken(honest: Any) -> Any:
        def mark(self: Any) -> None:
            raise AssertionError("nobody asked for the time of a microbatch")

        return mark

    _replace(steadfast.world.clock.HostClock, "mark", broken)


def forget_what_loaders_have_read() -> None:
    def broken(honest: Any) -> Any:
        def init(self: SpeedBalance, plan: Plan, num_ahead: int, *rest: Any) -> None:
            honest(self, plan, 0, *rest)

        return init

    _replace(SpeedBalance, "__init__", broken)


def reshare_one_step_later_on_rank_1() -> None:
    def broken(honest: Any) -> Any:
        return lambda self, first_step, shares: honest(self, first_step + dist.get_rank(), shares)

    _replace(Plan, "change", broken)


def add_gradients_as_floats() -> None:
    _replace(steadfast.parallel.buckets, "FixedPointSum", lambda honest: lambda fixed_point: PlainSum())


def add_losses_as_floats() -> None:
    for module in (steadfast.step.stepper, steadfast.loop.validate):
        _replace(module, "totals_of", lambda honest: lambda exact: Totals)


def keep_gathered_weights_over_the_update() -> None:
    def broken(honest: Any) -> Any:
        return lambda self, _: honest(self, False)

    _replace(FSDPModule, "set_reshard_after_backward", broken)


def take_the_unit_from_the_world() -> None:
    def broken(honest: Any) -> Any:
        def add(self: FixedPoint, total: Tensor, gradient: Tensor, first: bool) -> None:
            if self._scale is None:
                honest(self, total, gradient.clone(), True)
                assert self._scale is not None
                self._scale = self._scale / 8 ** dist.get_world_size()
            honest(self, total, gradient, first)

        return add

    _replace(FixedPoint, "add", broken)


def begin_with_threads(num_threads: int) -> None:
    """As the environment of a machine may have it."""
    torch.set_num_threads(num_threads)


def leave_the_number_of_threads(num_threads: int) -> None:
    """To the environment."""

    def broken(honest: Any) -> Any:
        def set_numerics(tf32: bool, deterministic: bool, _: int | None) -> None:
            honest(tf32, deterministic)
            torch.set_num_threads(num_threads)

        return set_numerics

    _replace(steadfast.worker, "set_numerics", broken)
