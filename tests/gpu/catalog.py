"""All drills, in the order in which they run. What each asserts is the docstring of its function."""

from __future__ import annotations

from tests.gpu.runner import Drill

_RANKS = "three-ranks"

CATALOG = (
    Drill(
        "ceilings", "what the device reaches by itself", "tests.gpu.ceilings:measure", 60, alone=True, torch_alone=True
    ),
    Drill(
        _RANKS, "three NCCL ranks on one GPU add up", "tests.gpu.recovery:three_ranks", 90, alone=True, torch_alone=True
    ),
    Drill("speed", "the app beside a straight loop, one rank", "tests.gpu.speed:world_of_one", 240, alone=True),
    Drill("clock", "the app's step time, rate and MFU against the wall clock", "tests.gpu.speed:clock", 30, alone=True),
    Drill("large-model", "MFU of a model of a billion weights", not_built="compile, 16-bit weights, loss in pieces"),
    Drill("compile", "no recompilation over many worlds", not_built="the app does not compile its model"),
    Drill("poison", "a death leaves the survivors no garbage", "tests.gpu.poison:ddp", 240, needs=_RANKS),
    Drill("abort", "an abort with a collective under way", "tests.gpu.recovery:abort", 120, needs=_RANKS),
    Drill(
        "watchdog",
        "torch's watchdog ends no survivor",
        "tests.gpu.recovery:watchdog",
        200,
        needs=_RANKS,
        torch_alone=True,
    ),
    Drill(
        "death-in-init", "a death while communicators connect", "tests.gpu.recovery:death_in_init", 150, needs=_RANKS
    ),
    Drill("cycles", "worlds of 3 and 2 in turn, nothing grows", "tests.gpu.cycles:ddp", 240, needs=_RANKS),
    Drill("cycles-fsdp", "the same with sharded state", "tests.gpu.cycles:fsdp", 180, needs=_RANKS),
    Drill(
        "fsdp-memory", "peaks of a sharded model, and change of strategy", "tests.gpu.memory:fsdp", 240, needs=_RANKS
    ),
    Drill("offload", "a sharded model with its state on the host", "tests.gpu.memory:offload", 180, needs=_RANKS),
    Drill("auto-size", "microbatches as large as fit", "tests.gpu.memory:auto", 150, alone=True),
    Drill("staging", "copies for checkpoints: whole, quick, small", "tests.gpu.memory:staging", 150),
    Drill("determinism", "same run, same bits", "tests.gpu.exactness:same_bits", 400),
    Drill("hang-truth", "the right rank is called hung", "tests.gpu.hangs:truth", 150, needs=_RANKS),
    Drill("compile-pause", "a compilation is no hang", "tests.gpu.hangs:compilation", 150, needs=_RANKS),
    Drill("set-ups", "two ranks on one GPU, and none on it", "tests.gpu.setups:starts", 150),
    Drill("loader", "the device does not wait for data", "tests.gpu.feeding:loader", 90, alone=True),
)
