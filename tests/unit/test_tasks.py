"""Tasks: built in, a function of the user's own, and logits of a few tokens at a time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tests.examples.operators  # noqa: F401 - before torchvision, which transformers imports
from steadfast.config import GptConfig, TargetTask, TaskConfig
from steadfast.errors import ConfigError, UsageError
from steadfast.models.gpt import Gpt
from steadfast.tasks import IGNORED, LanguageModeling, Sums, build_task

VOCABULARY, CONTEXT = 50, 12
TOKENS = torch.randint(VOCABULARY, (3, CONTEXT), generator=torch.Generator().manual_seed(1))
TARGETS = TOKENS.roll(-1, 1).masked_fill(TOKENS % 5 == 0, IGNORED)


def gpt() -> nn.Module:
    return Gpt(GptConfig(vocab_size=VOCABULARY, embed_dim=16, num_layers=1, num_heads=2, context_length=CONTEXT))


def hugging_face(kind: type[Any]) -> nn.Module:
    config = kind(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def llama() -> nn.Module:
    return hugging_face(transformers.LlamaConfig)


BATCHES: list[tuple[Callable[[], nn.Module], Any]] = [
    (gpt, (TOKENS, TARGETS)),
    (llama, {"input_ids": TOKENS, "labels": TARGETS}),
]


@pytest.mark.parametrize(("build", "batch"), BATCHES)
@pytest.mark.parametrize("num_tokens", [1, 7, 1000])
def test_loss_and_gradients_are_the_same(build: Callable[[], nn.Module], batch: Any, num_tokens: int) -> None:
    torch.manual_seed(2)
    model = build().eval()
    expected = LanguageModeling().loss(model, batch)
    expected.loss_sum.backward()
    gradients = [param.grad for param in model.parameters()]
    model.zero_grad()
    found = LanguageModeling(num_tokens).loss(model, batch)
    found.loss_sum.backward()
    torch.testing.assert_close(found.loss_sum, expected.loss_sum)
    assert found.count == expected.count
    for param, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(param.grad, gradient)
    torch.testing.assert_close(LanguageModeling().loss(model, batch).loss_sum, expected.loss_sum)  # as if never called


class Largest(TorchDispatchMode):
    """Looks for the most numbers in a tensor whose last dimension is the vocabulary."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dim() > 1 and result.shape[-1] == VOCABULARY:
            self.num_rows = max(self.num_rows, result.numel() // VOCABULARY)
        return result


def test_no_more_logits_are_held() -> None:
    model = gpt()
    with Largest() as largest:
        LanguageModeling(4).loss(model, (TOKENS, TARGETS)).loss_sum.backward()
    assert largest.num_rows == 16  # of the weight's own gradient, transposed: (embed, vocab)
    with Largest() as largest:
        LanguageModeling().loss(model, (TOKENS, TARGETS)).loss_sum.backward()
    assert largest.num_rows == TOKENS.numel()


def test_a_model_that_changes_its_logits_or_does_not_name_its_last_layer_is_refused() -> None:
    with pytest.raises(UsageError, match=r"task.chunk_tokens: the model changes the logits after its last layer"):
        LanguageModeling(4).loss(hugging_face(transformers.Gemma2Config), {"input_ids": TOKENS, "labels": TARGETS})
    with pytest.raises(UsageError, match=r"task.chunk_tokens: Embedding has no method get_output_embeddings\(\)"):
        LanguageModeling(4).loss(nn.Embedding(VOCABULARY, VOCABULARY), (TOKENS, TARGETS))


def test_classification_smooths_labels_as_torch_does() -> None:
    batch = torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 1])
    sums = build_task(TaskConfig(kind="classification", label_smoothing=0.1)).loss(nn.Identity(), batch)
    torch.testing.assert_close(sums.loss_sum, nn.functional.cross_entropy(*batch, label_smoothing=0.1) * 5)
    with pytest.raises(ValueError, match="only classification has labels"):
        TaskConfig(label_smoothing=0.1)


def squares(model: nn.Module, batch: Tensor, factor: float = 1.0) -> Sums:
    return Sums(factor * model(batch).square().sum(), len(batch))


def builds_nothing(model: nn.Module) -> None:
    """Neither a loss function nor one that builds a task."""


def test_a_target_may_be_the_loss_function_itself() -> None:
    batch = torch.ones(3, 2)
    task = build_task(TargetTask(target="tests.unit.test_tasks:squares"))
    assert task.loss(nn.Identity(), batch).loss_sum == 6.0
    task = build_task(TargetTask(target="tests.unit.test_tasks:squares", args={"factor": 2.0}))
    assert task.loss(nn.Identity(), batch).loss_sum == 12.0
    with pytest.raises(ConfigError, match=r"does not take \{\}: missing a required argument: 'model'"):
        build_task(TargetTask(target="tests.unit.test_tasks:builds_nothing"))
