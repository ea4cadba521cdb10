"""Speed at world 1 beside a loop that does nothing else, and whether the app's clock tells the truth about it."""

import json
from dataclasses import dataclass
from itertools import pairwise
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
_SHORT_ON_GPU = Size(_GPT2, 4, 4, 200)
_REHEARSED = Size(_TINY, 8, 4, 20)
_COMPILED_SHARE = 0.95  # of a compiled loop's rate, that the compiled app is to reach
_SHORT_SHARE = 0.96
_EXACT_COST = 1.05  # of the time of a step
_HALVES = 2  # each side is timed so many times, because one number shows no spread


def world_of_one(scene: Scene) -> None:
    """Train a GPT of 124 M parameters by a straight loop and by the app under torchrun, both uncompiled.

    Asserts that the app reaches 0.98 of the loop's tokens a second, by the wall clock of the ledger's lines.
    Figures: tokens a second of both, their ratio, each twice, MFU of both, memory peaks in GiB.
    """
    _compare(scene, _ON_GPU if scene.on_gpu else _REHEARSED, {}, wanted=0.98)


def small_step(scene: Scene) -> None:
    """Train the same in steps of 4,096 tokens, in which the host's time counts.

    Asserts that the app reaches 0.96 of the loop's tokens a second.
    Figures: as in `speed`, and the milliseconds by which a step of the app is longer.
    """
    size = _SHORT_ON_GPU if scene.on_gpu else _REHEARSED
    straight, app = _compare(scene, size, {}, _SHORT_SHARE)
    scene.figure(fixed_ms=1000 * size.tokens_per_step * (1 / mean(app) - 1 / mean(straight)))


def exact_cost(scene: Scene) -> None:
    """Train as in `speed` with run.exact.

    Asserts that a step takes at most 1.05 of its time in the run of `speed`.
    Figures: this ratio, twice, and tokens a second.
    """
    eager = _run_of_speed(scene)
    size = _ON_GPU if scene.on_gpu else _REHEARSED
    rates = _app(scene, size, {"run": {"exact": True}})
    costs = [former / rate for former, rate in zip(_rates(eager, size), rates, strict=True)]
    scene.figure(exact_tok_s=rates, exact_to_eager=costs)
    scene.check_on_gpu(mean(costs) <= _EXACT_COST, f"a step with run.exact takes {mean(costs):.3f} of the usual time")


def compiled(scene: Scene) -> None:
    """Train a GPT of 124 M parameters by a loop with compiled layers, and by the app with compile=blocks.

    Asserts that the app reaches 0.95 of the loop's tokens a second.
    Figures: tokens a second of both, their ratio, each twice, MFU of both, memory peaks in GiB.
    """
    _compare(scene, _ON_GPU if scene.on_gpu else _REHEARSED, {"compile": "blocks"}, _COMPILED_SHARE)


def large(scene: Scene) -> None:
    """Train a GPT of a billion parameters in bf16 by a loop with compiled layers, and by the app with compile=blocks.

    Asserts that the app reaches 0.95 of the loop's tokens a second. Figures: tokens a second of both, their ratio, MFU
    of both, memory peaks in GiB. A rehearsal trains a tiny model in fp32.
    """
    changes = {"compile": "blocks", "checkpoint": {"every": "1000000 steps", "node_memory": False}}
    _compare(scene, _LARGE_ON_GPU if scene.on_gpu else _REHEARSED, changes, _COMPILED_SHARE)


def _compare(scene: Scene, size: Size, changes: dict[str, Any], wanted: float) -> tuple[list[float], list[float]]:
    """Train by a straight loop, then by the app with changes to its configuration, and check the ratio of rates.

    Return the rates of both.
    """
    compiled = "compile" in changes
    if compiled and (lacking := missing_for_compile(scene.on_gpu)):
        raise Skip(f"torch.compile lacks {lacking}")
    straight = _straight(scene, size, compiled)
    scene.figure(straight_tok_s=straight, **_mfu(scene, "straight", size, mean(straight)))
    app = _app(scene, size, changes)
    ratios = [ours / theirs for ours, theirs in zip(app, straight, strict=True)]
    scene.figure(app_tok_s=app, app_to_straight=ratios, **_mfu(scene, "app", size, mean(app)))
    scene.check_on_gpu(mean(ratios) >= wanted, f"the app reaches {mean(ratios):.3f} of the straight loop")
    return straight, app


def _mfu(scene: Scene, name: str, size: Size, tokens_per_s: float) -> dict[str, float]:
    """Return the figure of what share of the device's peak a rate is; none where the peak is unknown."""
    peak = peak_flops(torch.cuda.get_device_name(), torch.bfloat16) if scene.on_gpu else None
    if peak is None:
        return {}
    with torch.device("meta"):
        flops_per_sample = Gpt(GptConfig(**size.model)).flops_per_sample()
    return {f"{name}_mfu": tokens_per_s * flops_per_sample / size.model["context_length"] / peak}


def _straight(scene: Scene, size: Size, compiled: bool) -> list[float]:
    """Return tokens a second of a plain loop with the app's model, format and optimizer, for each half of the steps."""
    device = torch.device(scene.device)
    with device:
        model = Gpt(GptConfig(**size.model))
    if compiled:
        for block in model.blocks():
            # With the app's own options, so that the app finds the compiled code in torch's cache.
            block.compile(fullgraph=True, dynamic=False, options={"fallback_random": True})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=scene.on_gpu)
    shape = (size.microbatch_size, size.model["context_length"])
    tokens = torch.randint(size.model["vocab_size"], shape, device=device)
    for _ in range(_WARM_UP):
        _straight_step(model, optimizer, tokens, size, scene.device)
    rates = []
    for _ in range(_HALVES):
        began_s = now_s(scene)
        for _ in range(size.steps // _HALVES):
            _straight_step(model, optimizer, tokens, size, scene.device)
        rates.append(size.tokens_per_step * (size.steps // _HALVES) / (now_s(scene) - began_s))
    if scene.on_gpu:
        scene.figure(straight_peak_gib=torch.cuda.max_memory_allocated() / 2**30)
        del model, optimizer
        torch.cuda.empty_cache()  # for the app, in another process
    return rates


def worlds(scene: Scene, times: int = 10) -> None:
    """Form a world of one process with compile=blocks, and 10 more, where torch raises an error if it must compile.

    Asserts that no world compiles anything again. Figures: the number of worlds.
    """
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


def _app(scene: Scene, size: Size, changes: dict[str, Any]) -> list[float]:
    """Return tokens a second of the app, from the moments at which the leader wrote its steps down."""
    configuration = _configuration(size, scene)
    for key, value in changes.items():
        configuration[key] = {**configuration[key], **value} if key in configuration else value
    command = Command(scene.folder, _RUN, yaml.safe_dump(configuration))
    command.start()
    # Killed as soon as all is known, because the checkpoint at the end takes long and shows nothing here.
    timed = command.wait_for_step(_WARM_UP + size.steps, _COMMAND_S)
    command.kill()
    if not timed:
        raise RuntimeError(f"the app has not taken {_WARM_UP + size.steps} steps: {command.last_words()}")
    if peaks := [line["memory_bytes"] for line in command.figures() if "memory_bytes" in line]:
        scene.figure(app_peak_gib=max(peaks) / 2**30)
    return _rates(command, size)


def _rates(run: RunFiles, size: Size) -> list[float]:
    """Return tokens a second by the wall clock, for each half of the timed steps."""
    ended_s = [line["time_s"] for line in run.ledger()]
    ends = [_WARM_UP - 1 + number * (size.steps // _HALVES) for number in range(_HALVES + 1)]
    return [size.tokens_per_step * (size.steps // _HALVES) / (ended_s[b] - ended_s[a]) for a, b in pairwise(ends)]


def _run_of_speed(scene: Scene) -> RunFiles:
    """Return the run of the drill `speed`. Raises Skip if there is none."""
    run = RunFiles(scene.folder.parent / "speed" / _RUN)
    if not run.ledger():
        raise Skip("speed has left no run to look at")
    return run


def _configuration(size: Size, scene: Scene) -> dict[str, Any]:
    """Return the configuration of the app's side: nothing is validated or saved half-way."""
    context, vocabulary = size.model["context_length"], size.model["vocab_size"]
    source = {"target": "tests.gpu.speed:Noise", "args": {"context": context, "vocabulary": vocabulary}}
    return {
        "run": {"steps": 1_000_000},
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
    run = _run_of_speed(scene)
    size = _ON_GPU if scene.on_gpu else _REHEARSED
    wall_s = size.tokens_per_step / mean(_rates(run, size))
    said_s = mean(line["step_s"] for line in run.ledger()[_WARM_UP : _WARM_UP + size.steps])
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
