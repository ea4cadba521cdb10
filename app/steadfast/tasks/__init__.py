"""Tasks compute the loss of a batch as a sum and a count.

The step divides the sum of all losses once, by the global count.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from steadfast.config import TargetTask, TaskConfig
from steadfast.data.batches import IGNORED as IGNORED
from steadfast.data.batches import Batch
from steadfast.errors import DataError, UsageError
from steadfast.models.gpt import Gpt


@dataclass(frozen=True)
class Mean:
    """Metric with a count of its own.

    An example is the recall: the correct samples of one class, divided by the samples of that class.
    """

    total: Tensor | float
    count: Tensor | float


@dataclass(frozen=True)
class Sums:
    """Loss of one microbatch as a sum.

    All values stay on the device, and loss_sum carries the gradient. A metric is a sum too, for example the number of
    correct samples, which becomes the accuracy:

        num_correct = (logits.argmax(1) == labels).sum()
        return Sums(cross_entropy(logits, labels, reduction="sum"), len(labels), {"accuracy": num_correct})
    """

    loss_sum: Tensor
    count: Tensor | int  # number of terms in loss_sum, such as tokens or samples; the mean loss divides by it
    # Metrics are sums that are divided by the count of the microbatches with the metric, or means with a count of their
    # own.
    metrics: Mapping[str, Tensor | float | Mean] = field(default_factory=dict)


class Task(Protocol):
    """Objective of the training.

    The built-in tasks take batches of (inputs, targets), or mappings like Hugging Face's models: `labels` are the
    targets, and all other entries are keyword arguments of the model. The tasks use `logits` of the model's output if
    it has them.

    A loss over the whole global batch has two methods instead: `embed(model, batch)` returns tensors with a row for
    each sample, and `loss(embeddings)` returns `Sums` over the rows of all microbatches, in the order of the grid.
    `embed` also returns the labels, if the loss needs them.

    Optional attributes:
        metrics: metrics of torchmetrics by name, which `loss` updates if `not model.training`; validation reports them.
        sample: a method (model, device) -> str | None, which returns text that shows what the model has learnt.
        model_methods: names of methods of the model other than forward that `loss` calls; fsdp needs the names.
    """

    def loss(self, model: nn.Module, batch: Batch) -> Sums: ...


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the losses of tokens: logits (tokens, vocab), targets int64 (tokens,)."""
    # A sum, because microbatches with few unmasked tokens would count too much in a mean of means.
    return F.cross_entropy(_full_precision(logits), targets, ignore_index=IGNORED, reduction="sum")


class LanguageModeling:
    """Next-token prediction by cross entropy.

    The count is the number of tokens whose target is not IGNORED.
    """

    _chunk_tokens: int | None = None  # a class attribute, for subclasses that do not call `__init__`
    summed_loss = staticmethod(summed_loss)  # `CompiledBlocks` replaces the function

    def __init__(self, chunk_tokens: int | None = None) -> None:
        """Limit the tokens whose logits are held at a time.

        `chunk_tokens` is None for all tokens of a microbatch.
        """
        self._chunk_tokens = chunk_tokens

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        """Sum the losses of the tokens in a batch.

        Inputs and targets are int64 (microbatch, context). In a mapping, each of the `labels` is predicted from the
        tokens before it.
        """
        if self._chunk_tokens is not None:
            return self._loss_in_chunks(model, batch, self._chunk_tokens)
        inputs, targets = _parts(batch)
        logits = _called(model, inputs)
        # Labels in a mapping are aligned with their tokens, but the logits at a token are for the next one.
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
            # The loss draws no random numbers, so the generators' states need not be kept for the backward.
            again = partial(checkpoint, _loss_of_hidden, head, use_reentrant=False, preserve_rng_state=False)
            sums = [again(part, wanted) for part, wanted in zip(*chunks, strict=True)]
            found.append(torch.stack(sums).sum())
            return found[0]

        # The chunks are computed in place of the last layer's forward, because a sharded layer has its whole weight
        # only there. A forward that was already set on the layer itself is restored at the end.
        before = vars(head).get("forward")
        vars(head)["forward"] = summed
        try:
            outputs = _called(model, inputs)
        finally:
            del vars(head)["forward"]
            if before is not None:
                vars(head)["forward"] = before
        # Only the unchanged output of the last layer is the loss that the chunks have summed.
        if outputs is not found[0]:
            raise UsageError(
                "task.chunk_tokens: the model changes the logits after its last layer, so chunks cannot be used"
            )
        return Sums(found[0], (targets != IGNORED).sum())

    def sample(self, model: nn.Module, device: torch.device) -> str | None:
        """Generate 200 bytes of text, the same for the same weights.

        Returns None if the model does not generate bytes.
        """
        if not isinstance(model, Gpt) or model.config.vocab_size != 256:
            return None
        # The generator has its own seed, so that a sample draws no number from the training's generators.
        prompt = torch.tensor(list(b"The "), device=device)
        text = model.generate(prompt, 200, 0.8, torch.Generator().manual_seed(1))
        return bytes(text.tolist()).decode(errors="replace")


class Classification:
    """Classification by cross entropy, with accuracy as a metric.

    The count is the number of samples.
    """

    _label_smoothing = 0.0  # a class attribute, for subclasses that do not call `__init__`

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self._label_smoothing = label_smoothing

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        """Sum the losses of the samples in a batch; targets are int64 (microbatch,)."""
        logits, targets = _forward(model, batch)
        loss_sum = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=self._label_smoothing)
        # The number stays on the device, because reading it would make the host wait in every step.
        num_correct = (logits.argmax(-1) == targets).sum()
        return Sums(loss_sum, len(targets), {"accuracy": num_correct})


class Regression:
    """Regression by squared error, averaged over a sample's outputs.

    The count is the number of samples.
    """

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        """Sum the losses of the samples in a batch.

        Targets (microbatch, ...) have the shape of the outputs.
        """
        outputs, targets = _forward(model, batch)
        # Without the reshape, (microbatch,) and (microbatch, 1) would silently broadcast to a square.
        errors = (outputs.reshape(targets.shape) - targets.to(outputs.dtype)).square()
        return Sums(errors.reshape(len(targets), -1).mean(1).sum(), len(targets))


def build_task(config: TaskConfig | TargetTask) -> Task:
    """Return the task of the configuration.

    Raises ConfigError if the target is not a task.
    """
    if isinstance(config, TaskConfig):
        if config.kind == "language_modeling":
            return LanguageModeling(config.chunk_tokens)
        if config.kind == "classification":
            return Classification(config.label_smoothing)
        return Regression()
    from steadfast.tasks.own import build_own_task  # a late import, because the module needs the types of this one

    return build_own_task(config)


def _forward(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the model's outputs in full precision, and the targets."""
    inputs, targets = _parts(batch)
    return _full_precision(_called(model, inputs)), targets


def _parts(batch: Batch) -> tuple[Any, Tensor]:
    """Return the inputs and the targets of a batch."""
    if isinstance(batch, Mapping):
        if "labels" not in batch:
            raise DataError(
                f"a batch has no labels, only {', '.join(map(str, batch))}; a task of your own may work without labels"
            )
        # Names and other texts of a sample are not passed to the model. With the labels, a model of Hugging Face
        # would compute a mean loss of its own.
        named = {name: part for name, part in batch.items() if name != "labels" and isinstance(part, Tensor)}
        return named, batch["labels"]
    inputs, targets = batch
    return inputs, targets


def _called(model: nn.Module, inputs: Any) -> Tensor:
    outputs = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    # A model of Hugging Face returns an object that holds its logits beside other tensors.
    logits: Tensor = getattr(outputs, "logits", outputs)
    return logits


def _head_of(model: nn.Module) -> nn.Linear:
    """Return the model's layer that computes logits.

    Raises UsageError if the model does not name the layer.
    """
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
    # A sum of thousands of losses in bf16 would lose small losses.
    if outputs.dtype == torch.float64:
        return outputs
    return outputs.float()
