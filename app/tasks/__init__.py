"""What a model is trained for: the loss as a sum and its count, to be divided once, by the global count."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from app.config import Target, TaskConfig
from app.errors import ConfigError, Problem
from app.imports import build_target
from app.models.gpt import Gpt

IGNORED = -100  # cross_entropy's own mark for a target that does not count


@dataclass(frozen=True)
class Sums:
    """Of one microbatch. Everything stays on the device; loss_sum carries the gradient."""

    loss_sum: Tensor
    count: Tensor | int
    metrics: dict[str, Tensor] = field(default_factory=dict)  # sums too, reported divided by count


class Task(Protocol):
    """May also have `sample(model, device) -> str | None`: text that shows what the model has learnt."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums: ...


class LanguageModeling:
    """Next-token cross entropy; the count is the tokens whose target is not IGNORED."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums:
        """batch: inputs, targets, both int64 (microbatch, context)."""
        inputs, targets = batch
        logits = _full_precision(model(inputs)).flatten(0, 1)
        loss_sum = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return Sums(loss_sum, (targets != IGNORED).sum())

    def sample(self, model: nn.Module, device: torch.device) -> str | None:
        """Two hundred bytes, the same for the same weights; None from a model that does not write bytes."""
        if not isinstance(model, Gpt) or model.config.vocab_size != 256:
            return None
        prompt = torch.tensor(list(b"The "), device=device)
        text = model.generate(prompt, 200, 0.8, torch.Generator().manual_seed(1))
        return bytes(text.tolist()).decode(errors="replace")


class Classification:
    """Cross entropy over classes, and accuracy; the count is the samples."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums:
        """batch: inputs, targets int64 (microbatch,)."""
        inputs, targets = batch
        logits = _full_precision(model(inputs))
        correct = (logits.argmax(-1) == targets).sum()
        return Sums(F.cross_entropy(logits, targets, reduction="sum"), len(targets), {"accuracy": correct})


class Regression:
    """Squared error, averaged over the outputs of a sample; the count is the samples."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums:
        """batch: inputs, targets (microbatch, ...) of as many numbers as the model's outputs."""
        inputs, targets = batch
        outputs = _full_precision(model(inputs))
        # reshape: (microbatch,) against (microbatch, 1) would broadcast to a square without a word
        errors = (outputs.reshape(targets.shape) - targets.to(outputs.dtype)).square()
        return Sums(errors.reshape(len(targets), -1).mean(1).sum(), len(targets))


_TASKS: dict[str, type[Task]] = {
    "language_modeling": LanguageModeling,
    "classification": Classification,
    "regression": Regression,
}


def build_task(config: TaskConfig | Target) -> Task:
    """The task the config names."""
    if isinstance(config, TaskConfig):
        return _TASKS[config.kind]()
    task: Task = build_target(config.target, config.args, "task")
    if not callable(getattr(task, "loss", None)):
        what = f'"{config.target}" gave a {type(task).__name__} without loss(model, batch)'
        raise ConfigError([Problem("", "task.target", what)])
    return task


def _full_precision(outputs: Tensor) -> Tensor:
    """A sum of thousands of bf16 losses would lose the small ones."""
    return outputs if outputs.dtype == torch.float64 else outputs.float()
