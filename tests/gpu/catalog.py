"""All drills, in the order in which they run. The docstring of a drill's function names its claims and figures."""

from functools import partial

from tests.gpu.runner import Drill

_RANKS = "three-ranks"
_first = partial(Drill, part=1)
_second = partial(Drill, part=2, needs=_RANKS)

CATALOG = (
    _first("ceilings", "what the device reaches", "tests.gpu.ceilings:measure", 60, alone=True, torch_alone=True),
    _first("speed", "the app beside a straight loop, one rank", "tests.gpu.speed:world_of_one", 240, alone=True),
    _first("clock", "the app's own figures against the wall clock", "tests.gpu.speed:clock", 30, alone=True),
    _first("compile", "the compiled app beside a compiled loop", "tests.gpu.speed:compiled", 300, alone=True),
    _first("large-model", "the same with a billion parameters", "tests.gpu.speed:large", 240, alone=True),
    _first("auto-size", "microbatches as large as fit", "tests.gpu.memory:auto", 150, alone=True),
    _first("loader", "the device does not wait for data", "tests.gpu.feeding:loader", 90, alone=True),
    _first("determinism", "same run, same bits", "tests.gpu.exactness:same_bits", 400),
    _first("staging", "copies for checkpoints: whole, quick, small", "tests.gpu.memory:staging", 150),
    _first("ways", "ways to train, and races of streams", "tests.gpu.setups:ways", 180),
    _first("set-ups", "two ranks on one GPU, and none on it", "tests.gpu.setups:starts", 150),
    Drill(_RANKS, "three ranks on one GPU add up", "tests.gpu.recovery:three_ranks", 90, alone=True, torch_alone=True),
    _second("abort", "an abort with a collective under way", "tests.gpu.recovery:abort", 180, alone=True),
    _second("poison", "a death leaves the survivors no garbage", "tests.gpu.poison:ddp", 240),
    _second("watchdog", "torch's watchdog ends no survivor", "tests.gpu.recovery:watchdog", 200, torch_alone=True),
    _second("death-in-init", "a death while communicators connect", "tests.gpu.recovery:death_in_init", 180),
    _second("late-peer", "a rank may be late in a collective", "tests.gpu.collectives:late_peer", 170),
    _second("faulty-device", "a device that fails is its own rank's fault", "tests.gpu.faults:faulty_device", 180),
    Drill("rollback", "ten rollbacks, nothing grows", "tests.gpu.faults:rollback", 160),
    Drill("node-memory", "pinned copies of shards that change size", "tests.gpu.copies:node_memory", 120),
    _second("soak", "very many collectives", "tests.gpu.collectives:soak", 170),
    _second("cycles", "worlds of 3 and 2 in turn, nothing grows", "tests.gpu.cycles:ddp", 240),
    _second("fsdp-memory", "peaks of a sharded model, and change of strategy", "tests.gpu.memory:fsdp", 240),
    _second("cycles-fsdp", "the same with sharded state", "tests.gpu.cycles:fsdp", 180),
    _second("hang-truth", "the right rank is called hung", "tests.gpu.hangs:truth", 150),
    _second("compile-pause", "a compilation is no hang", "tests.gpu.hangs:compilation", 150),
    _second("offload", "a sharded model with its state on the host", "tests.gpu.memory:offload", 180),
)
