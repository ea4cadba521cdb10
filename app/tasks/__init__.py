"""Tasks: each gives the loss as a sum and its count, to be divided once, by the global count of the step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from app.config import TargetTask, TaskConfig
from app.config.target import build_target
from app.data.batches import Batch
from app.errors import DataError, UsageError
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
    """Objective of the training.

    The built-in ones take batches of (inputs, targets), or mappings as Hugging Face's models do: `labels` are the
    targets, and all else goes to the model by name. Of a model's outputs they read `logits`, if they have them.

    A loss over the whole global batch has two methods instead: `embed(model, batch)` returns tensors with a row for
    each sample, and `loss(embeddings)` returns `Sums` over the rows of all microbatches, in the order of the grid.
    `embed` also returns the labels, if the loss needs them.

    Optional attributes:
        metrics: torchmetrics' by name, which `loss` updates where `not model.training`; validation reports them.
        sample: a method (model, device) -> str | None, which may show in text what the model has learnt.
        model_methods: names of methods of the model beside forward that `loss` calls, which fsdp has to know.
    """

    def loss(self, model: nn.Module, batch: Batch) -> Sums: ...


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum over tokens: logits (tokens, vocab), targets int64 (tokens,)."""
    return F.cross_entropy(_full_precision(logits), targets, ignore_index=IGNORED, reduction="sum")


class LanguageModeling:
    """Predict the next token by cross entropy; the count is the tokens whose target is not IGNORED."""

    _chunk_tokens: int | None = None  # also of a subclass that does not call `__init__`
    summed_loss = staticmethod(summed_loss)  # which `CompiledBlocks` replaces

    def __init__(self, chunk_tokens: int | None = None) -> None:
        """Have logits of no more than `chunk_tokens` tokens at a time, None for all of a microbatch."""
        self._chunk_tokens = chunk_tokens

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        """Sum over the tokens of a batch of inputs and targets, both int64 (microbatch, context).

        In a mapping, `labels` stand where their tokens do, and each is predicted from the tokens before it.
        """
        if self._chunk_tokens is not None:
            return self._loss_in_chunks(model, batch, self._chunk_tokens)
        inputs, targets = _parts(batch)
        logits = _called(model, inputs)
        if isinstance(batch, Mapping):
            logits, targets = logits[:, :-1], targets[:, 1:]
        return Sums(self.summed_loss(logits.flatten(0, 1), targets.flatten()), (targets != IGNORED).sum())

    @staticmethod
    def _loss_in_chunks(model: nn.Module, batch: Batch, num_tokens: int) -> Sums:
        inputs, targets = _parts(batch)
        shift = isinstance(batch, Mapping)
        if shift:
            targets = targets[:, 1:]
        head = _head_of(model)
        found: list[Tensor] = []

        def summed(hidden: Tensor) -> Tensor:
            if shift:
                hidden = hidden[:, :-1]
            chunks = hidden.flatten(0, 1).split(num_tokens), targets.flatten().split(num_tokens)
            again = partial(checkpoint, _loss_of_hidden, head, use_reentrant=False, preserve_rng_state=False)
            sums = [again(part, wanted) for part, wanted in zip(*chunks, strict=True)]
            found.append(torch.stack(sums).sum())
            return found[0]

        # In the place of the layer's own forward, where a sharded one has all of its weight.
        before = vars(head).get("forward")
        vars(head)["forward"] = summed
        try:
            outputs = _called(model, inputs)
        finally:
            del vars(head)["forward"]
            if before is not None:
                vars(head)["forward"] = before
        if outputs is not found[0]:
            raise UsageError(
                "task.chunk_tokens: the model changes the logits behind its last layer, so they cannot be had in chunks"
            )
        return Sums(found[0], (targets != IGNORED).sum())

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
    "classification": Classification,
    "regression": Regression,
}


def build_task(config: TaskConfig | TargetTask) -> Task:
    """Return the task that the configuration names. Raises ConfigError if an object of the user's own is none."""
    if isinstance(config, TaskConfig):
        if config.kind == "language_modeling":
            return LanguageModeling(config.chunk_tokens)
        return _TASKS[config.kind]()
    from app.tasks.own import own_task  # needs the types of this module

    return own_task(build_target(config.target, config.args, "task"), config.target)


def _forward(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the model's outputs in full precision, and the targets."""
    inputs, targets = _parts(batch)
    return _full_precision(_called(model, inputs)), targets


def _parts(batch: Batch) -> tuple[Any, Tensor]:
    """Return what of a batch goes to the model, and the targets."""
    if isinstance(batch, Mapping):
        if "labels" not in batch:
            raise DataError(
                f"a batch has no labels, only {', '.join(map(str, batch))}; a task of your own can do without"
            )
        targets = batch["labels"]
        # Names and other texts of a sample stay behind.
        return {name: part for name, part in batch.items() if name != "labels" and isinstance(part, Tensor)}, targets
    inputs, targets = batch
    return inputs, targets


def _called(model: nn.Module, inputs: Any) -> Tensor:
    outputs = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    logits: Tensor = getattr(outputs, "logits", outputs)
    return logits


def _head_of(model: nn.Module) -> nn.Linear:
    """Return the layer that makes logits. Raises UsageError if the model does not say which it is."""
    method: Any = getattr(model, "get_output_embeddings", None)
    head = method() if callable(method) else None
    if not isinstance(head, nn.Linear):
        raise UsageError(
            f"task.chunk_tokens: {type(model).__name__} has no method get_output_embeddings() that returns the "
            "nn.Linear which makes the logits"
        )
    return head


def _loss_of_hidden(head: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
    return summed_loss(F.linear(hidden, head.weight, head.bias), targets)


def _full_precision(outputs: Tensor) -> Tensor:
    # A sum of thousands of bf16 losses would lose the small ones.
    if outputs.dtype == torch.float64:
        return outputs
    return outputs.float()
