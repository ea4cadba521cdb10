"""Whether the same run gives the same bits, left alone and interrupted."""

from concurrent.futures import ThreadPoolExecutor

import yaml

from tests.gpu.commands import Command
from tests.gpu.poison import EXACT
from tests.gpu.scene import Scene

_BOUND_S = 120.0
_STRICT = {**EXACT, "NCCL_NVLS_ENABLE": "0"}
_MODEL = {"num_layers": 4, "num_heads": 4, "embed_dim": 128, "context_length": 128, "vocab_size": 256, "dropout": 0.1}
_REHEARSED = {**_MODEL, "num_layers": 1, "embed_dim": 32}  # in fp32: most CPUs emulate bf16
_STEPS = 60


def same_bits(scene: Scene) -> None:
    """Train 60 steps in bf16 twice as it comes, then three times strictly: left alone, killed, and stopped.

    Strict is run.deterministic.
    Asserts that all strict runs end in the same weights and optimizer, to the bit. Figures: whether the runs as they
    come do too, and how many attempts the interrupted ones took.
    """
    commands = {name: _command(scene, name) for name in ("default-a", "default-b", "alone", "killed", "stopped")}
    with ThreadPoolExecutor(5 if scene.on_gpu else 1) as pool:
        done = [pool.submit(_finish, command) for name, command in commands.items() if name != "stopped"]
        done.append(pool.submit(_stop_and_finish, commands["stopped"]))
        for each in done:
            each.result()
    hashes = {}
    for name, command in commands.items():
        summary = command.summary()
        hashes[name] = f"{summary.get('model_sha256')} {summary.get('optimizer_sha256')}"
        scene.check(summary.get("status") == "finished", f"{name} has not finished: {command.last_words()}")
    scene.figure(default_equal=str(hashes["default-a"] == hashes["default-b"]))
    for name in ("killed", "stopped"):
        scene.figure(**{f"{name}_attempts": commands[name].summary().get("attempts", 0)})
        scene.check(hashes[name] == hashes["alone"], f"a strict run that was {name} ends in other bits")
        scene.check(commands[name].summary().get("attempts", 0) > 1, f"the run that was to be {name} was not")


def _command(scene: Scene, name: str) -> Command:
    strict = not name.startswith("default")
    size = _MODEL if scene.on_gpu else _REHEARSED
    faults = [{"kind": "kill_at", "step": 33}] if name == "killed" else []
    noise = {"target": "tests.gpu.speed:Noise", "args": {"context": 128, "vocabulary": 256}}
    config = {
        "run": {"steps": _STEPS, "deterministic": strict},
        "batch": {"global_size": 16, "microbatch_size": 8},
        "model": {"kind": "gpt", **size},
        "data": {**noise, "validation_fraction": 0.0},
        "precision": {"kind": "bf16" if scene.on_gpu else "fp32"},
        "checkpoint": {"every": "20 steps"},
        "validation": {"every": None},
        "logging": {"every_steps": 1},
        "faults": {"inject": faults},
        "trackers": [],
    }
    return Command(scene.folder, name, yaml.safe_dump(config))


def _finish(command: Command) -> None:
    """Run a command until it has finished: a second time where a fault has ended the first."""
    environment = {} if command.name.startswith("default") else _STRICT
    for _ in range(2):
        if command.run(_BOUND_S, **environment) == 0:
            return


def _stop_and_finish(command: Command) -> None:
    command.start(**_STRICT)
    if command.wait_for_step(25, _BOUND_S):
        command.interrupt()
    command.wait(_BOUND_S)
    _finish(command)
