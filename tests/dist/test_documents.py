"""Documents in one file of tokens train equally in any world, and a model that mixes them is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

import tests.examples.operators  # noqa: F401 - before torchvision, which transformers imports
from steadfast.config import Config
from tests.support.claims import check_run, check_weights
from tests.support.deaths import plot, survive
from tests.support.drill import drill
from tests.support.gang import MemberFailed
from tests.support.reference import reference
from tests.support.small import CONTEXT, VOCABULARY, small

HERE = "tests.dist.test_documents"
END = 0


def documents(storage: Path, *words: str) -> Config:
    chance = np.random.default_rng(3)
    tokens: list[int] = []
    while len(tokens) < 2000:
        tokens += [*chance.integers(1, VOCABULARY, chance.integers(0, 8)), END]
    storage.mkdir(exist_ok=True)
    np.array(tokens, np.uint16).tofile(storage / "tokens.bin")
    return small(
        storage,
        f"data={{kind: tokens, path: {storage}/tokens.bin, end_token: {END}, context_length: {CONTEXT}}}",
        *words,
    )


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "{kind: pipeline, stages: 2}"])
def test_documents_train_equally_over_changes_of_the_world(tmp_path: Path, kind: str) -> None:
    config = documents(tmp_path, f"parallel={kind if kind.startswith('{') else f'{{kind: {kind}}}'}")
    worlds = [2, 4, 2] if "pipeline" in kind else [2, 1, 3]
    drill(config, worlds=worlds, leave_after=[3, 2], stop_after=2)
    check_run(drill(config, worlds=worlds[:1]), reference(config))


def test_documents_train_equally_through_kills(tmp_path: Path) -> None:
    config = documents(tmp_path, "run.steps=18", "checkpoint.every=4 steps")
    check_weights(survive(config, plot(1, 14)).left, reference(config))


class Mixing(nn.Module):
    """Takes positions, but looks at all tokens before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.positions = nn.Embedding(CONTEXT, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        seen = (self.embed(input_ids) + self.positions(position_ids)).cumsum(1)
        logits: Tensor = self.head(seen)
        return logits


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, **sizes))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_model_that_mixes_documents_is_refused(tmp_path: Path, kind: str) -> None:
    said = r"UsageError: data\.end_token: the loss of a document depends on the document before it"
    with pytest.raises(MemberFailed, match=said):
        drill(documents(tmp_path, f"model={{target: '{HERE}:Mixing'}}", f"parallel.kind={kind}"), worlds=[2])


def test_a_model_of_hugging_face_keeps_documents_apart(tmp_path: Path) -> None:
    config = documents(tmp_path, f"model={{target: '{HERE}:llama'}}", "run.steps=4")
    found = [line["loss"] for line in drill(config, worlds=[2]).history.lines]
    assert found == pytest.approx(reference(config).losses, rel=1e-6)  # its angles are float32
