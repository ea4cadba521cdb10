"""Speed at world 1 beside a loop that does nothing else, and whether the app's clock tells the truth about it."""

import json
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import torch
import yaml
from torch import nn
from torch.nn import functional as F  # noqa: N812

from steadfast.config import GptConfig
from steadfast.models.gpt import Gpt
from steadfast.telemetry.throughput import peak_flops
from tests.gpu.ceilings import now_s
from tests.gpu.commands import Command, RunFiles
from tests.gpu.machine import missing_for_compile
from tests.gpu.scene import Scene, Skip
from tests.gpu.worlds import Company

_RUN = "app"
_WARM_UP = 10  # steps that are not timed
_COMMAND_S, _COMPILE_S = 180.0, 90.0


@dataclass(frozen=True)
class Size:
    """A model, a step, and how many of them are timed."""

    model: dict[str, int]
    global_size: int
    microbatch_size: int
    steps: int

    @property
    def tokens_per_step(self) -> int:
        return self.global_size * self.model["context_length"]


# GPT-2's smallest, with a vocabulary that divides well; microbatches of 32 k tokens.
_GPT2 = {"num_layers": 12, "num_heads": 12, "embed_dim": 768, "context_length": 1024, "vocab_size": 50304}
# A billion parameters; microbatches of 16 k tokens.
_LARGE = {"num_layers": 16, "num_heads": 16, "embed_dim": 2048, "context_length": 2048, "vocab_size": 50304}
_TINY = {"num_layers": 2, "num_heads": 2, "embed_dim": 64, "context_length": 32, "vocab_size": 256}
_ON_GPU = Size(_GPT2, 64, 32, 40)
_LARGE_ON_GPU = Size(_LARGE, 16, 8, 20)
_REHEARSED = Size(_TINY, 8, 4, 20)
_COMPILED_SHARE = 0.95  # of a compiled loop's rate, that the compiled app is to reach


def world_of_one(scene: Scene) -> None:
    """Train a GPT of 124 M parameters by a straight loop and by the app under torchrun, both uncompiled.

    Asserts that the app reaches 0.98 of the loop's tokens a second, by the wall clock of the ledger's lines.
    Figures: tokens a second of both, their ratio, MFU of both, memory peaks in GiB.
    """
    _compare(scene, _ON_GPU if scene.on_gpu else _REHEARSED, {}, wanted=0.98)


def compiled(scene: Scene) -> None:
    """Train a GPT of 124 M parameters by a loop with compiled layers, and by the app with compile=blocks.

    Then form a world of one process 10 times anew, where torch raises an error if it must compile again.
    Asserts that the app reaches 0.95 of the loop's tokens a second, and that no world compiles anything again.
    Figures: tokens a second of both, their ratio, MFU of both, memory peaks in GiB, the number of worlds.
    """
    _compare(scene, _ON_GPU if scene.on_gpu else _REHEARSED, {"compile": "blocks"}, _COMPILED_SHARE)
    _reform(scene, 10)


def large(scene: Scene) -> None:
    """Train a GPT of a billion parameters in bf16 by a loop with compiled layers, and by the app with compile=blocks.

    Asserts that the app reaches 0.95 of the loop's tokens a second. Figures: tokens a second of both, their ratio, MFU
    of both, memory peaks in GiB. A rehearsal trains a tiny model in fp32.
    """
    changes = {"compile": "blocks", "checkpoint": {"every": "1000000 steps", "node_memory": False}}
    _compare(scene, _LARGE_ON_GPU if scene.on_gpu else _REHEARSED, changes, _COMPILED_SHARE)


def _compare(scene: Scene, size: Size, changes: dict[str, Any], wanted: float) -> None:
    """Train by a straight loop, then by the app with changes to its configuration, and check the ratio of rates."""
    compiled = "compile" in changes
    if compiled and (lacking := missing_for_compile(scene.on_gpu)):
        raise Skip(f"torch.compile lacks {lacking}")
    straight = _straight(scene, size, compiled)
    scene.figure(straight_tok_s=straight, **_mfu(scene, "straight", size, straight))
    app = _app(scene, size, changes)
    scene.figure(app_tok_s=app, app_to_straight=app / straight, **_mfu(scene, "app", size, app))
    scene.check_on_gpu(app >= wanted * straight, f"the app reaches {app / straight:.3f} of the straight loop")


def _mfu(scene: Scene, name: str, size: Size, tokens_per_s: float) -> dict[str, float]:
    """Return the figure of what share of the device's peak a rate is; none where the peak is unknown."""
    peak = peak_flops(torch.cuda.get_device_name(), torch.bfloat16) if scene.on_gpu else None
    if peak is None:
        return {}
    with torch.device("meta"):
        flops_per_sample = Gpt(GptConfig(**size.model)).flops_per_sample()
    return {f"{name}_mfu": tokens_per_s * flops_per_sample / size.model["context_length"] / peak}


def _straight(scene: Scene, size: Size, compiled: bool) -> float:
    """Return tokens a second of a plain loop with the app's model, format and optimizer."""
    device = torch.device(scene.device)
    with device:
        model = Gpt(GptConfig(**size.model))
    if compiled:
        for block in model.blocks():
            block.compile(fullgraph=True, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=scene.on_gpu)
    shape = (size.microbatch_size, size.model["context_length"])
    tokens = torch.randint(size.model["vocab_size"], shape, device=device)
    for _ in range(_WARM_UP):
        _straight_step(model, optimizer, tokens, size, scene.device)
    began_s = now_s(scene)
    for _ in range(size.steps):
        _straight_step(model, optimizer, tokens, size, scene.device)
    step_s = (now_s(scene) - began_s) / size.steps
    if scene.on_gpu:
        scene.figure(straight_peak_gib=torch.cuda.max_memory_allocated() / 2**30)
        del model, optimizer
        torch.cuda.empty_cache()  # for the app, in another process
    return size.tokens_per_step / step_s


def _reform(scene: Scene, times: int) -> None:
    """Train in a world of one process, and as many times in another one, which must compile nothing."""
    model = {"kind": "gpt", "num_layers": 2, "num_heads": 2, "embed_dim": 64, "context_length": 32}
    overrides = [
        "run.steps=1000000",
        "compile=blocks",
        f"model={json.dumps(model)}",
        "data={target: 'tests.gpu.speed:Noise', args: {context: 32, vocabulary: 256}, num_workers: 0}",
        "task={kind: language_modeling}",
    ]
    company = Company(scene, overrides, "worlds", stance="fail_on_recompile")
    with company.ranks as ranks:
        company.start(0)
        company.form([0])
        company.train_on("the first world", _COMPILE_S)
        for number in range(times):
            company.resize()
            company.form([0])
            company.train_on(f"world {number + 2}", _COMPILE_S)
        company.resize()
        company.end()
        codes = ranks.wait(_COMPILE_S)
    scene.figure(num_worlds=len(company.events("attempt_started")))
    ranks.check_ended(codes, what="member")
    for name in ("not_compiled", "recompiled", "graph_break"):
        found = company.events(name)
        scene.check(not found, f"{name}: {found}")


def _straight_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, size: Size, device: str
) -> None:
    for _ in range(size.global_size // size.microbatch_size):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits = model(tokens)
        (F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()) / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _app(scene: Scene, size: Size, changes: dict[str, Any]) -> float:
    """Return tokens a second of the app, from the moments at which the leader wrote its steps down."""
    command = Command(scene.folder, _RUN, yaml.safe_dump(_configuration(size, scene) | changes))
    code = command.run(_COMMAND_S)
    if code != 0:
        raise RuntimeError(f"the app ended with {code}: {command.last_words()}")
    if peaks := [line["memory_bytes"] for line in command.figures() if "memory_bytes" in line]:
        scene.figure(app_peak_gib=max(peaks) / 2**30)
    return size.tokens_per_step / _wall_step_s(command)


def _wall_step_s(run: RunFiles) -> float:
    """Return the mean seconds from one step's end to the next one's, without the first steps and the last."""
    ended_s = [line["time_s"] for line in run.ledger()][_WARM_UP:-1]
    return float((ended_s[-1] - ended_s[0]) / (len(ended_s) - 1))


def _configuration(size: Size, scene: Scene) -> dict[str, Any]:
    """Return the configuration of the app's side: nothing is validated or saved half-way."""
    context, vocabulary = size.model["context_length"], size.model["vocab_size"]
    source = {"target": "tests.gpu.speed:Noise", "args": {"context": context, "vocabulary": vocabulary}}
    return {
        "run": {"steps": _WARM_UP + size.steps},
        "batch": {"global_size": size.global_size, "microbatch_size": size.microbatch_size},
        "model": {"kind": "gpt", **size.model},
        "data": {**source, "validation_fraction": 0.0},
        "precision": {"kind": "bf16" if scene.on_gpu else "fp32"},
        "checkpoint": {"every": "1000000 steps"},
        "validation": {"every": None},
        "logging": {"every_steps": 5},
        "trackers": [],
    }


class Noise:
    """Random tokens, drawn once."""

    counts_vary = False

    def __init__(self, context: int, vocabulary: int, num_samples: int = 1024) -> None:
        self.units_per_sample = context
        generator = torch.Generator().manual_seed(3)
        self._tokens = torch.randint(vocabulary, (num_samples, context + 1), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        return self._tokens[index, :-1], self._tokens[index, 1:]


def clock(scene: Scene) -> None:
    """Compare what the run of `speed` said of its own time with the wall clock: no run of its own.

    Asserts that the ledger's seconds a step and the logged tokens a second are within 3 % of it, and that MFU is
    below 100 %. Figures: the three, as ratios to the wall clock; MFU as it was logged.
    """
    run = RunFiles(scene.folder.parent / "speed" / _RUN)
    if not run.ledger():
        raise Skip("speed has left no run to look at")
    size = _ON_GPU if scene.on_gpu else _REHEARSED
    wall_s = _wall_step_s(run)
    said_s = mean(line["step_s"] for line in run.ledger()[_WARM_UP:-1])
    scene.figure(wall_ms=1000 * wall_s, ledger_to_wall=said_s / wall_s)
    scene.check_on_gpu(abs(said_s / wall_s - 1) <= 0.03, f"the ledger's step_s is {said_s / wall_s:.3f} of the wall's")
    logged = [line for line in run.figures() if line["step"] > _WARM_UP]
    rates = [line["units_per_s"] for line in logged if line.get("units_per_s")]
    if not rates:
        raise RuntimeError(f"no rate was logged; the fields are {sorted(logged[-1])}")
    ratio = median(rates) * wall_s / size.tokens_per_step
    scene.figure(logged_to_wall=ratio)
    scene.check_on_gpu(abs(ratio - 1) <= 0.03, f"the logged tokens a second are {ratio:.3f} of the wall clock's")
    mfu = [line["mfu"] for line in logged if line.get("mfu")]
    if mfu:
        scene.figure(mfu=median(mfu))
        scene.check(max(mfu) < 1, f"MFU is {max(mfu):.2f}")
