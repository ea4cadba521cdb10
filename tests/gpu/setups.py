"""Ways to start the app on a machine with one GPU, and ways to train there, that must end well or be refused."""

import time
from concurrent.futures import ThreadPoolExecutor

import yaml

from tests.gpu.commands import Command
from tests.gpu.older_torch import REDUCER_LACKS
from tests.gpu.scene import Scene

_BOUND_S = 60.0
_BAD_USAGE = 2
_SMALL_GPT = {
    "run": {"steps": 10},
    "batch": {"global_size": 16, "microbatch_size": 4},
    "model": {"kind": "gpt", "num_layers": 2, "num_heads": 2, "embed_dim": 64, "context_length": 32},
    "data": {"target": "tests.gpu.speed:Noise", "args": {"context": 32, "vocabulary": 256}},
    "checkpoint": {"every": "3 steps"},
    "trackers": [],
}
_MLP = {"kind": "mlp", "in_features": 64, "hidden": [128], "out_features": 8}


_WAYS = {
    "exact": ["run.exact=true"],
    "fp16": ["precision.kind=fp16"],
    "checkpointing": ["memory.activation_checkpointing=full"],
    "torch_reducer": ["parallel={kind: ddp, reducer: torch}"],
    "sanitized": [],
    "sanitized_fsdp": ["parallel.kind=fsdp"],
}


def ways(scene: Scene) -> None:
    """Train 10 steps of a GPT in each way that changes what runs on the device, twice under torch's sanitizer.

    The sanitizer raises where two streams use memory without an order. Checkpoints and copies in memory are on.
    Asserts that each run finishes; a rehearsal leaves out fp16 and the sanitizer. Figures: exit codes.
    """
    commands: dict[str, Command] = {}
    for name in _WAYS:
        if name == "torch_reducer" and REDUCER_LACKS:
            scene.figure(**{f"{name}_code": REDUCER_LACKS})
        elif scene.on_gpu or name != "fp16":
            commands[name] = Command(scene.folder, name, yaml.safe_dump(_SMALL_GPT))

    def run(name: str) -> int | None:
        sanitizes = scene.on_gpu and name.startswith("sanitized")
        variables = {"TORCH_CUDA_SANITIZER": "1"} if sanitizes else {}
        return commands[name].run(_BOUND_S, *_WAYS[name], **variables)

    with ThreadPoolExecutor(3 if scene.on_gpu else 1) as pool:
        codes = list(pool.map(run, commands))
    for (name, command), code in zip(commands.items(), codes, strict=True):
        scene.figure(**{f"{name}_code": str(code)})
        scene.check(code == 0, f"{name}: ended with {code}: {command.last_words()}")


def starts(scene: Scene) -> None:
    """Start two ranks under torchrun: on the one GPU, and with gpus_per_worker 0, which means the CPU.

    Asserts that the first trains, or is refused within a minute as bad usage; and that the second trains. Nothing may
    try for ever. Figures: exit codes and seconds.
    """
    for name, gpus in (("one_gpu", "auto"), ("no_gpu", 0)):
        command = Command(scene.folder, name, yaml.safe_dump(_configuration(gpus)), num_ranks=2)
        began_s = time.monotonic()
        code = command.run(_BOUND_S)
        seconds = time.monotonic() - began_s
        scene.figure(**{f"{name}_code": str(code)})
        scene.figure(**{f"{name}_s": seconds})
        fine = (0,) if name == "no_gpu" else (0, _BAD_USAGE)
        scene.check(_own_code(command, code) in fine, f"{name}: ended with {code}: {command.last_words()}")


def _own_code(command: Command, code: int | None) -> int | None:
    # Torchrun makes 1 of whatever its workers return, and says what that was.
    refused = code == 1 and f"exitcode  : {_BAD_USAGE}" in command.log.read_text()
    return _BAD_USAGE if refused else code


def _configuration(gpus: str | int) -> dict[str, object]:
    return {
        "run": {"steps": 10},
        "scaling": {"gpus_per_worker": gpus},
        "batch": {"global_size": 16, "microbatch_size": 4},
        "model": _MLP,
        "task": {"kind": "classification"},
        "data": {"target": "tests.gpu.subjects:Points", "validation_fraction": 0.0},
        "checkpoint": {"every": "1000000 steps"},
        "validation": {"every": None},
        "trackers": [],
    }
