"""Samples that are no tuples of tensors, shards of MosaicML's Streaming and packed documents, over whole runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from steadfast.config import Config, TargetData
from steadfast.data import build_dataset
from steadfast.data.batches import Batch
from steadfast.tasks import IGNORED, LanguageModeling, Sums
from tests.support.claims import check_equal, check_identical, check_ledger, check_run, check_weights
from tests.support.deaths import plot, survive
from tests.support.drill import drill
from tests.support.gang import MemberFailed
from tests.support.reference import expected_ledger, reference
from tests.support.small import CONTEXT, VOCABULARY, Tokens, small

HERE = "tests.dist.test_batches"


class NamedTokens(Tokens):
    """The same tokens, as Hugging Face's datasets hold them."""

    def __getitem__(self, index: int, /) -> Any:
        inputs, targets = super().__getitem__(index)
        return {"tokens": inputs, "nested": (f"line {index}", {"targets": targets})}


class NamedLanguageModeling(LanguageModeling):
    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        assert batch["nested"][0][0].startswith("line ")
        return super().loss(model, (batch["tokens"], batch["nested"][1]["targets"]))


def test_batches_of_any_shape_go_through_a_whole_run(tmp_path: Path) -> None:
    plain = drill(small(tmp_path / "plain"), worlds=[2, 3], leave_after=[4])
    words = [f"data.target={HERE}:NamedTokens", f"task.target={HERE}:NamedLanguageModeling"]
    named = drill(small(tmp_path / "named", *words), worlds=[2, 3], leave_after=[4])
    check_identical(named, plain)
    digests = [[line["samples_digest"] for line in run.history.lines] for run in (named, plain)]
    assert digests[0] == digests[1]


class RaggedTexts:
    """Texts of two to seven tokens, as mappings."""

    def __len__(self) -> int:
        return 61

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        return {"tokens": torch.arange(index, index + 2 + index % 6) % VOCABULARY, "name": f"text {index}"}


def padded(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """What a user gives as data.collate: texts padded to the longest, where nothing is to be predicted."""
    tokens = pad_sequence([sample["tokens"] for sample in samples], batch_first=True, padding_value=IGNORED)
    return {"tokens": tokens.clamp(min=0), "labels": tokens}


# Takes a batch by name, as Hugging Face's models do.
NAMED_MODEL = "model.target=tests.support.models:Embedded"


def test_ragged_samples_with_a_function_that_pads_them_are_used_once_over_changes_of_the_world(tmp_path: Path) -> None:
    words = [f"data.target={HERE}:RaggedTexts", NAMED_MODEL, "run.epochs=3"]
    words += [f"data.{of}collate={{target: '{HERE}:padded'}}" for of in ("", "validation.")]
    config = small(tmp_path / "changing", *words)
    run = drill(config, worlds=[2, 1, 3], leave_after=[4, 4])
    check_ledger(run, expected_ledger(config))
    check_equal(run.weights, drill(small(tmp_path / "alone", *words), worlds=[1]).weights)


def test_samples_that_validation_cannot_stack_are_told_before_the_first_step(tmp_path: Path) -> None:
    words = [f"data.target={HERE}:RaggedTexts", NAMED_MODEL]
    with pytest.raises(MemberFailed, match=r"DataError: data\.validation\.collate is missing"):
        drill(small(tmp_path, *words, f"data.collate={{target: '{HERE}:padded'}}"), worlds=[2])
    assert not list(tmp_path.rglob("step-*"))


class NextToken(LanguageModeling):
    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        assert batch["name"][0].startswith("sample ")
        return super().loss(model, (batch["tokens"][:, :-1], batch["tokens"][:, 1:]))


def write_shards(folder: Path) -> str:
    """Write 61 samples to shards of a few each."""

    streaming = pytest.importorskip("streaming", reason="needs MosaicML Streaming, which `make` installs")
    rng = np.random.default_rng(1)
    columns = {"tokens": "ndarray:int64", "name": "str"}
    with streaming.MDSWriter(out=str(folder), columns=columns, size_limit=1000) as writer:
        for index in range(61):
            writer.write({"tokens": rng.integers(VOCABULARY, size=CONTEXT + 1), "name": f"sample {index}"})
    assert len(list(folder.glob("shard.*.mds"))) > 3
    return str(folder)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of files that Streaming leaves to be closed
def test_shards_are_read_whole_and_once_over_changes_of_the_world(tmp_path: Path) -> None:
    local = write_shards(tmp_path / "shards")
    dataset: Any = build_dataset(TargetData(target="tests.examples.streaming:Shards", args={"local": local}))
    assert [dataset[index]["name"] for index in range(61)] == [f"sample {index}" for index in range(61)]
    words = [
        "data.target=tests.examples.streaming:Shards",
        f"data.args={{local: {local}}}",
        f"task.target={HERE}:NextToken",
        "run.epochs=3",
    ]
    config = small(tmp_path / "changing", *words)
    run = drill(config, worlds=[2, 1, 2], leave_after=[4, 4])
    check_ledger(run, expected_ledger(config))
    check_equal(run.weights, drill(small(tmp_path / "alone", *words), worlds=[1]).weights)


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


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_model_that_mixes_documents_is_refused(tmp_path: Path, kind: str) -> None:
    said = r"UsageError: data\.end_token: the loss of a document depends on the document before it"
    with pytest.raises(MemberFailed, match=said):
        drill(documents(tmp_path, f"model.target={HERE}:Mixing", f"parallel.kind={kind}"), worlds=[2])


def test_a_model_of_hugging_face_keeps_documents_apart(tmp_path: Path) -> None:
    llama = "model.target=tests.dist.test_models_nobody_here_wrote:llama"
    config = documents(tmp_path, llama, "run.steps=4")
    found = [line["loss"] for line in drill(config, worlds=[2]).history.lines]
    assert found == pytest.approx(reference(config).losses, rel=1e-6)  # its angles are float32
