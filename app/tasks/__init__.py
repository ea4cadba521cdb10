"""Tasks: each gives the loss as a sum and its count, to be divided once, by the global count of the step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from app.config import Target, TaskConfig
from app.config.target import build_target
from app.data.batches import Batch
from app.errors import ConfigError, DataError, Problem
from app.models.gpt import Gpt

# The mark of a masked target, as in cross_entropy's default.
IGNORED = -100


@dataclass(frozen=True)
class Mean:
    """A metric with a count of its own: the correct ones among those that were asked for, say."""

    total: Tensor | float
    count: Tensor | float


@dataclass(frozen=True)
class Sums:
    """The loss of one microbatch as a sum. Everything stays on the device; loss_sum carries the gradient."""

    loss_sum: Tensor
    count: Tensor | int
    # Sums too, to be divided by the count of the microbatches that have them, or means with counts of their own.
    metrics: Mapping[str, Tensor | float | Mean] = field(default_factory=dict)


class Task(Protocol):
    """What a model is trained for.

    The built-in ones take batches of (inputs, targets), or mappings as Hugging Face's models do: `labels` are the
    targets, and all else goes to the model by name. Of a model's outputs they read `logits`, if they have them.

    Optional attributes:
        metrics: torchmetrics' by name, which `loss` updates where `not model.training`; validation reports them.
        sample: a method (model, device) -> str | None, which may show in text what the model has learnt.
    """

    def loss(self, model: nn.Module, batch: Batch) -> Sums: ...


class LanguageModeling:
    """Predict the next token by cross entropy; the count is the tokens whose target is not IGNORED."""

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        """Sum over the tokens of a batch of inputs and targets, both int64 (microbatch, context).

        In a mapping, `labels` stand where their tokens do, and each is predicted from the tokens before it.
        """
        logits, targets = _forward(model, batch)
        if isinstance(batch, Mapping):
            logits = logits[:, :-1]
            targets = targets[:, 1:]
        loss_sum = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return Sums(loss_sum, (targets != IGNORED).sum())

    def sample(self, model: nn.Module, device: torch.device) -> str | None:
        """Write two hundred bytes, the same for the same weights; None for a model that does not write bytes."""
        if not isinstance(model, Gpt) or model.config.vocab_size != 256:
            return None
        # A seed of its own, so that showing a sample draws nothing from the training's generators.
        prompt = torch.tensor(list(b"The "), device=device)
        text = model.generate(prompt, 200, 0.8, torch.Generator().manual_seed(1))
        return bytes(text.tolist()).decode(errors="replace")


class Classification:
    """Predict a class by cross entropy, and measure accuracy; the count is the samples."""

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        """Sum over the samples of a batch of inputs and targets, the latter int64 (microbatch,)."""
        logits, targets = _forward(model, batch)
        loss_sum = F.cross_entropy(logits, targets, reduction="sum")
        num_correct = (logits.argmax(-1) == targets).sum()
        return Sums(loss_sum, len(targets), {"accuracy": num_correct})


class Regression:
    """Predict numbers by squared error, averaged over the outputs of a sample; the count is the samples."""

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        """Sum over the samples of a batch of inputs and targets, the latter (microbatch, ...) as the outputs."""
        outputs, targets = _forward(model, batch)
        # Without the reshape, (microbatch,) against (microbatch, 1) would broadcast to a square without a word.
        errors = (outputs.reshape(targets.shape) - targets.to(outputs.dtype)).square()
        return Sums(errors.reshape(len(targets), -1).mean(1).sum(), len(targets))


_TASKS: dict[str, type[Task]] = {
    "language_modeling": LanguageModeling,
    "classification": Classification,
    "regression": Regression,
}


def build_task(config: TaskConfig | Target) -> Task:
    """Build the task that the config names. Raises ConfigError if the user's own has no loss."""
    if isinstance(config, TaskConfig):
        return _TASKS[config.kind]()
    task: Task = build_target(config.target, config.args, "task")
    if not callable(getattr(task, "loss", None)):
        what = f'"{config.target}" gave a {type(task).__name__} without loss(model, batch)'
        raise ConfigError([Problem("", "task.target", what)])
    return task


def _forward(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the model's outputs in full precision, and the targets."""
    if isinstance(batch, Mapping):
        if "labels" not in batch:
            raise DataError(
                f"a batch has no labels, only {', '.join(map(str, batch))}; a task of your own can do without"
            )
        targets = batch["labels"]
        # Names and other texts of a sample stay behind.
        inputs = {name: part for name, part in batch.items() if name != "labels" and isinstance(part, Tensor)}
        outputs = model(**inputs)
    else:
        inputs, targets = batch
        outputs = model(inputs)
    return _full_precision(getattr(outputs, "logits", outputs)), targets


def _full_precision(outputs: Tensor) -> Tensor:
    # A sum of thousands of bf16 losses would lose the small ones.
    if outputs.dtype == torch.float64:
        return outputs
    return outputs.float()
