"""Documents in one file of tokens: losses are those of each document alone."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from steadfast.config import GptConfig, TaskConfig
from steadfast.data.datasets import TokensDataset, positions_in_documents
from steadfast.models import build_model
from steadfast.parallel.blocks import stop_caching
from steadfast.tasks import build_task

END = 0
CONTEXT = 24


def gpt() -> nn.Module:
    return build_model(GptConfig(num_layers=2, num_heads=2, embed_dim=16, context_length=CONTEXT, vocab_size=50))


def llama() -> nn.Module:
    import tests.examples.operators  # noqa: F401, I001 - before torchvision, which transformers imports
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=CONTEXT, **sizes))
    return model


def written(path: Path, num_tokens: int = 500) -> TokensDataset:
    """Write documents of 1 to 30 tokens, some longer than a window."""
    chance = np.random.default_rng(3)
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        tokens += [*chance.integers(1, 50, chance.integers(0, 30)), END]
    np.array(tokens, np.uint16).tofile(path)
    return TokensDataset(str(path), "uint16", CONTEXT, END)


def pieces(window: Tensor) -> list[Tensor]:
    """Return the documents of a window, (tokens,), and the parts of those that are cut."""
    found, begin = [], 0
    for place, token in enumerate(window.tolist()):
        if token == END or place == len(window) - 1:
            found.append(window[begin : place + 1])
            begin = place + 1
    return found


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    found: Any = model(tokens[None])
    logits: Tensor = getattr(found, "logits", found)
    return logits[0]


@pytest.mark.parametrize("build", [gpt, llama])
def test_the_loss_of_packed_documents_is_that_of_each_alone(tmp_path: Path, build: Any) -> None:
    dataset = written(tmp_path / "tokens.bin")
    torch.manual_seed(0)
    model = build().double()
    stop_caching(model)
    sums = build_task(TaskConfig()).loss(model, dataset.read_batch(np.arange(len(dataset))))
    loss, count = torch.zeros((), dtype=torch.float64), 0
    for start in range(0, len(dataset) * CONTEXT, CONTEXT):
        window = torch.from_numpy(dataset.tokens[start : start + CONTEXT + 1].astype(np.int64))
        for document in pieces(window):
            if len(document) > 1:
                loss = loss + F.cross_entropy(logits_of(model, document[:-1]), document[1:], reduction="sum")
                count += len(document) - 1
    assert int(sums.count) == count
    torch.testing.assert_close(sums.loss_sum, loss, rtol=1e-10, atol=1e-10)
    grads = torch.autograd.grad(sums.loss_sum, list(model.parameters()), allow_unused=True)
    expected = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    torch.testing.assert_close(grads, expected, rtol=1e-8, atol=1e-8)


def test_without_an_end_token_the_file_is_one_text_and_pickles_keep_the_token(tmp_path: Path) -> None:
    documents = pickle.loads(pickle.dumps(written(tmp_path / "tokens.bin")))
    assert documents.counts_vary
    assert documents[1][0].keys() == {"input_ids", "position_ids"}
    dataset = TokensDataset(str(tmp_path / "tokens.bin"), "uint16", CONTEXT)
    inputs, targets = dataset[0]
    assert not dataset.counts_vary
    assert torch.equal(inputs[1:], targets[:-1])


def test_positions_begin_anew_after_each_end() -> None:
    ends = torch.tensor([[0, 0, 1, 0, 0], [1, 1, 0, 0, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)
    assert positions_in_documents(ends).tolist() == [[0, 1, 2, 0, 1], [0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
