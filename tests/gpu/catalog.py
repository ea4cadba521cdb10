"""All drills, in the order in which they run. The docstring of a drill's function names its claims and figures."""

from functools import partial

from tests.gpu.runner import Drill

_RANKS = "three-ranks"
_first = partial(Drill, first=True)
_several = partial(Drill, needs=_RANKS)

# Of each: name, summary, function, seconds expected on an H200, and the bound.
CATALOG = (
    _first("ceilings", "what the device reaches", "tests.gpu.ceilings:measure", 12, 60, alone=True, torch_alone=True),
    _first(
        _RANKS, "three ranks on one GPU add up", "tests.gpu.recovery:three_ranks", 20, 90, alone=True, torch_alone=True
    ),
    _first("speed", "the app beside a straight loop, one rank", "tests.gpu.speed:world_of_one", 45, 180, alone=True),
    _first("clock", "the app's own figures against the wall clock", "tests.gpu.speed:clock", 3, 30, alone=True),
    _first("exact-cost", "run.exact beside the run of `speed`", "tests.gpu.speed:exact_cost", 30, 120, alone=True),
    _first(
        "small-step",
        "the app's time beside the device's, in a short step",
        "tests.gpu.speed:small_step",
        45,
        120,
        alone=True,
    ),
    _first("compile", "the compiled app beside a compiled loop", "tests.gpu.speed:compiled", 90, 240, alone=True),
    _first(
        "abort", "an abort with a collective under way", "tests.gpu.recovery:abort", 30, 120, alone=True, needs=_RANKS
    ),
    _first("poison", "a death leaves the survivors no garbage", "tests.gpu.poison:ddp", 60, 200, needs=_RANKS),
    _first(
        "death-in-init",
        "a death while communicators connect",
        "tests.gpu.recovery:death_in_init",
        55,
        180,
        needs=_RANKS,
    ),
    _first(
        "faulty-device",
        "a device that fails is its own rank's fault",
        "tests.gpu.faults:faulty_device",
        40,
        150,
        needs=_RANKS,
    ),
    _first("rollback", "ten rollbacks, nothing grows", "tests.gpu.faults:rollback", 40, 160),
    _first("node-memory", "pinned copies of shards that change size", "tests.gpu.copies:node_memory", 15, 120),
    _first("worlds", "worlds of one process in turn compile nothing", "tests.gpu.speed:worlds", 40, 180),
    _first("ways", "ways to train, and races of streams", "tests.gpu.setups:ways", 60, 180),
    _first("late-peer", "a rank may be late in a collective", "tests.gpu.collectives:late_peer", 90, 170, needs=_RANKS),
    Drill("large-model", "the same with a billion parameters", "tests.gpu.speed:large", 120, 240, alone=True),
    Drill("auto-size", "microbatches as large as fit", "tests.gpu.memory:auto", 60, 150, alone=True),
    Drill("loader", "the device does not wait for data", "tests.gpu.feeding:loader", 40, 90, alone=True),
    Drill("determinism", "same run, same bits", "tests.gpu.exactness:same_bits", 200, 400),
    Drill("staging", "copies for checkpoints: whole, quick, small", "tests.gpu.memory:staging", 90, 150),
    Drill("set-ups", "two ranks on one GPU, and none on it", "tests.gpu.setups:starts", 60, 150),
    _several(
        "watchdog", "torch's watchdog ends no survivor", "tests.gpu.recovery:watchdog", 100, 200, torch_alone=True
    ),
    _several("soak", "very many collectives", "tests.gpu.collectives:soak", 60, 170),
    _several("cycles", "worlds of 3 and 2 in turn, nothing grows", "tests.gpu.cycles:ddp", 120, 240),
    _several("fsdp-memory", "peaks of a sharded model, and change of strategy", "tests.gpu.memory:fsdp", 120, 240),
    _several("cycles-fsdp", "the same with sharded state", "tests.gpu.cycles:fsdp", 120, 180),
    _several("hang-truth", "the right rank is called hung", "tests.gpu.hangs:truth", 60, 150),
    _several("compile-pause", "a compilation is no hang", "tests.gpu.hangs:compilation", 60, 150),
    _several("offload", "a sharded model with its state on the host", "tests.gpu.memory:offload", 60, 180),
)
