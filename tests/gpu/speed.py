"""Speed at world 1 beside a loop that does nothing else, and whether the app's clock tells the truth about it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import torch
import yaml
from torch import nn
from torch.nn import functional as F  # noqa: N812

from steadfast.config import GptConfig
from steadfast.models.gpt import Gpt
from tests.gpu.commands import Command, RunFiles
from tests.gpu.machine import can_compile
from tests.gpu.scene import Scene, Skip

_RUN = "app"
_WARM_UP = 10  # steps that are not timed


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
_TINY = {"num_layers": 2, "num_heads": 2, "embed_dim": 64, "context_length": 32, "vocab_size": 256}
_ON_GPU = Size(_GPT2, 64, 32, 40)
_REHEARSED = Size(_TINY, 8, 4, 20)


def world_of_one(scene: Scene) -> None:
    """Train a GPT of 124 M parameters by a straight loop, eager and compiled, and by the app under torchrun.

    Asserts that the app reaches 0.98 of the eager loop's tokens a second, by the wall clock of the ledger's lines.
    Figures: tokens a second of each, the app's ratio to both loops, memory peaks in GiB.
    """
    size = _ON_GPU if scene.on_gpu else _REHEARSED
    eager = _straight(scene, size, compiled=False)
    scene.figure(eager_tok_s=eager)
    if lacking := can_compile() if scene.on_gpu else "a GPU":
        scene.figure(compiled=f"not measured: without {lacking}")
    else:
        compiled = _straight(scene, size, compiled=True)
        scene.figure(compiled_tok_s=compiled)
    app = _app(scene, size)
    scene.figure(app_tok_s=app, app_to_eager=app / eager)
    if "compiled_tok_s" in scene.figures:
        scene.figure(app_to_compiled=app / compiled)
    scene.check_on_gpu(app >= 0.98 * eager, f"the app reaches {app / eager:.3f} of the eager loop")


def _straight(scene: Scene, size: Size, compiled: bool) -> float:
    """Return tokens a second of a plain loop with the app's model, format and optimizer."""
    device = torch.device(scene.device)
    model = Gpt(GptConfig(**size.model)).to(device)
    if compiled:
        for block in model.blocks():
            block.compile(fullgraph=True, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=scene.on_gpu)
    shape = (size.microbatch_size, size.model["context_length"])
    tokens = torch.randint(size.model["vocab_size"], shape, device=device)
    for _ in range(_WARM_UP):
        _straight_step(model, optimizer, tokens, size, scene.device)
    began_s = _now_s(scene)
    for _ in range(size.steps):
        _straight_step(model, optimizer, tokens, size, scene.device)
    step_s = (_now_s(scene) - began_s) / size.steps
    if scene.on_gpu:
        name = "compiled_peak_gib" if compiled else "eager_peak_gib"
        scene.figure(**{name: torch.cuda.max_memory_allocated() / 2**30})
        del model, optimizer
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return size.tokens_per_step / step_s


def _now_s(scene: Scene) -> float:
    """Return the time at which the device has done all that it was given."""
    if scene.on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


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


def _app(scene: Scene, size: Size) -> float:
    """Return tokens a second of the app, from the moments at which the leader wrote its steps down."""
    command = Command(scene.folder, _RUN, yaml.safe_dump(configuration(size, scene)))
    code = command.run(180)
    if code != 0:
        raise RuntimeError(f"the app ended with {code}: {command.last_words()}")
    if peaks := [line["memory_bytes"] for line in command.figures() if "memory_bytes" in line]:
        scene.figure(app_peak_gib=max(peaks) / 2**30)
    return size.tokens_per_step / _wall_step_s(command)


def _wall_step_s(run: RunFiles) -> float:
    """Return the mean seconds from one step's end to the next one's, without the first steps and the last."""
    ended_s = [line["time_s"] for line in run.ledger()][_WARM_UP:-1]
    return float((ended_s[-1] - ended_s[0]) / (len(ended_s) - 1))


def configuration(size: Size, scene: Scene) -> dict[str, Any]:
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
