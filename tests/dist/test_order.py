"""`data.order`: every world reads the samples in it, through kills and resumes, and the audit proves it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from steadfast.analysis.audit import audit
from steadfast.config import Config
from steadfast.data import Extent, build_dataset
from steadfast.data.order import Int64s
from steadfast.errors import RunConflict
from steadfast.launch.resume import start_or_resume
from steadfast.run.directory import RunDirectory
from steadfast.run.events import RunStarted
from steadfast.tasks import Sums
from tests.support.claims import check_equal, check_run, check_weights
from tests.support.deaths import plot, survive
from tests.support.drill import drill
from tests.support.gang import MemberFailed
from tests.support.reference import reference
from tests.support.small import CONTEXT, VOCABULARY, Tokens, small

HERE = "tests.dist.test_order"


WEIGHTED = "data.order={target: 'tests.support.orders:Weighted'}"
SOURCE = "{target: 'tests.support.small:Tokens', args: {num_samples: %d}, weight: %s}"
# The second source has fewer samples than one batch takes from it, and draws them by weights.
FEW = f"{SOURCE[:-1] % (3, 0.5)}, order: {{target: 'tests.support.orders:Weighted'}}}}"
MIXTURE = f"data={{kind: mixture, sources: [{SOURCE % (61, 0.5)}, {FEW}]}}"
ORDERS = pytest.mark.parametrize(
    "order", ["data.order=sequential", WEIGHTED, MIXTURE], ids=["sequential", "weighted", "mixture"]
)


@ORDERS
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_an_order_is_read_once_over_changes_of_the_world_and_a_resume(tmp_path: Path, order: str, kind: str) -> None:
    config = small(tmp_path, order, f"parallel.kind={kind}")
    drill(config, worlds=[2, 1, 3], leave_after=[3, 2], stop_after=2)
    check_run(drill(config, worlds=[1]), reference(config))


@ORDERS
def test_an_order_is_read_once_through_kills(tmp_path: Path, order: str) -> None:
    config = small(tmp_path, order, "run.steps=24", "checkpoint.every=4 steps")
    survived = survive(config, plot(1, 20))
    check_weights(survived.left, reference(config))
    assert survived.left.summary["step"] == 24


def test_loader_processes_read_an_order_of_the_users_own(tmp_path: Path) -> None:
    config = small(tmp_path, WEIGHTED, "data.num_workers=1")
    check_run(drill(config, worlds=[2]), reference(config))


def test_a_run_is_not_resumed_in_another_order(tmp_path: Path) -> None:
    drill(small(tmp_path, "data.order=sequential"), worlds=[1], stop_after=3)
    directory = RunDirectory.of(small(tmp_path))
    directory.write_config(small(tmp_path, "data.order=sequential"))
    with pytest.raises(RunConflict, match=r"data\.order: sequential -> shuffled"):
        start_or_resume(small(tmp_path), directory, RunStarted(launcher="torchrun"), lambda line: None)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_shards_and_a_mixture_with_them_are_read_once_through_kills(tmp_path: Path, kind: str) -> None:
    write_rows(tmp_path / "rows", kind)
    shards = f"kind: {kind}, path: {tmp_path}/rows, columns: [inputs, targets]"
    alone = f"data={{{shards}, collate: {{target: '{HERE}:as_tokens'}}, validation_fraction: 0}}"
    mixed = f"data={{kind: mixture, sources: [{{{shards}, weight: 2}}, {SOURCE % (23, 1)}]"
    mixed += f", collate: {{target: '{HERE}:as_tokens'}}, validation_fraction: 0}}"
    for name, data in (("alone", alone), ("mixed", mixed)):
        config = small(tmp_path / name, data, "run.steps=18", "checkpoint.every=4 steps")
        check_weights(survive(config, plot(1, 14)).left, reference(config))


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.more)])
def test_text_images_and_rows_are_mixed_equally_over_changes_of_the_world(tmp_path: Path, kind: str) -> None:
    import_operators()
    write_rows(tmp_path / "rows", "parquet")
    write_images(tmp_path / "images")
    sources = [
        f"{{kind: text, context_length: {CONTEXT}, weight: 3}}",
        f"{{kind: parquet, path: {tmp_path}/rows, columns: [inputs, targets], weight: 2}}",
        f"{{kind: image_folder, path: {tmp_path}/images, image_size: 8, augment: false, weight: 1}}",
    ]
    data = f"data={{kind: mixture, sources: [{', '.join(sources)}], collate: {{target: '{HERE}:as_tokens'}}}}"
    # Validation has samples of all sources too.
    config = small(tmp_path, data, f"data.validation.collate.target={HERE}:as_tokens", f"parallel.kind={kind}")
    drill(config, worlds=[2, 1, 3], leave_after=[3, 2], stop_after=2, patch=import_operators)
    check_run(drill(config, worlds=[1], patch=import_operators), reference(config))
    directory = RunDirectory.of(config)
    total = 14 * 13
    found = audit(directory, config, Extent.of(build_dataset(config.data))).source_samples
    assert all(abs(count - total * weight / 6) < 1 for count, weight in zip(found, (3, 2, 1), strict=True))


def import_operators() -> None:
    import tests.examples.operators  # noqa: F401 - before torchvision


def write_images(folder: Path) -> None:
    for number in range(20):
        place = folder / f"class{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (12, 12, 3), np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")


def as_tokens(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """Make a batch of text or pairs, of rows with names, and of images, whose first pixels become tokens."""
    pairs = []
    for sample in samples:
        first, second = sample.values() if isinstance(sample, dict) else sample
        if torch.is_tensor(first) and first.ndim == 3:
            tokens = (first.flatten()[: CONTEXT + 1].abs() * 7).long()
            first, second = tokens[:-1], tokens[1:]
        pairs.append((torch.as_tensor(first) % VOCABULARY, torch.as_tensor(second) % VOCABULARY))
    inputs, targets = (torch.stack(values) for values in zip(*pairs, strict=True))
    return inputs, targets


def write_rows(folder: Path, kind: str) -> None:
    folder.mkdir()
    tokens = Tokens(71, masked=False)
    rows = [dict(zip(("inputs", "targets"), map(Tensor.tolist, tokens[index]), strict=True)) for index in range(71)]
    for number, part in enumerate((rows[:40], rows[40:])):
        if kind == "parquet":
            parquet.write_table(pyarrow.Table.from_pylist(part), folder / f"{number}.parquet", row_group_size=8)
        else:
            (folder / f"{number}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in part))


def by_chance(seed: int, epoch: Int64s, place: Int64s, num_samples: int) -> Int64s:
    return np.random.randint(num_samples, size=len(place))


ROWS, CHUNKS, LENGTH, WIDTH = 4, 5, 6, 3


class Texts:
    """Rows of text, each cut into chunks. A sample is (inputs, targets, number of the chunk), row after row."""

    def __init__(self) -> None:
        text = torch.randint(7, (ROWS, CHUNKS * LENGTH + 1), generator=torch.Generator().manual_seed(3))
        self.inputs = text[:, :-1].reshape(ROWS * CHUNKS, LENGTH)
        self.targets = text[:, 1:].reshape(ROWS * CHUNKS, LENGTH)

    def __len__(self) -> int:
        return ROWS * CHUNKS

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor, int]:
        return self.inputs[index], self.targets[index], index % CHUNKS


def chunk_after_chunk(seed: int, epoch: Int64s, place: Int64s, num_samples: int) -> Int64s:
    """A step reads the next chunk of every row."""
    chunk, row = np.divmod(place, ROWS)
    return row * CHUNKS + chunk


class Recurrent(nn.Module):
    """Goes on from the state in which it has left the chunk before."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH)
        self.rnn = nn.RNN(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 7)
        self.register_buffer("state", torch.zeros(1, ROWS, WIDTH))

    def forward(self, tokens: Tensor, chunk: int) -> Tensor:
        before = torch.zeros_like(self.state) if chunk == 0 else self.state.clone()
        found, after = self.rnn(self.embed(tokens), before)
        self.state.copy_(after.detach())
        logits: Tensor = self.head(found)
        return logits


class NextToken:
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Sums:
        tokens, targets, chunks = batch
        assert len(set(chunks.tolist())) == 1
        logits = model(tokens, int(chunks[0]))
        return Sums(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel())


def test_truncated_backpropagation_carries_its_state_as_in_a_plain_loop(tmp_path: Path) -> None:
    words = [
        "batch={global_size: 4, microbatch_size: 4}",
        f"model={{target: '{HERE}:Recurrent'}}",
        f"task={{target: '{HERE}:NextToken'}}",
        f"data={{target: '{HERE}:Texts', order: {{target: '{HERE}:chunk_after_chunk'}}, validation_fraction: 0}}",
        "optimizer={kind: sgd, lr: 0.1, momentum: 0, max_grad_norm: null}",
        "schedule={kind: constant}",
    ]
    with pytest.raises(MemberFailed, match="UsageError: NextToken: the loss of half of a batch of 4 samples fails"):
        drill(small(tmp_path / "not coupled", *words), worlds=[1])
    config = small(tmp_path, *words, "task.coupled=true")
    drill(config, worlds=[1], stop_after=6)
    run = drill(config, worlds=[1])
    weights, losses = plain_loop(config)
    check_equal(run.weights, weights)
    assert [line["loss"] for line in run.history.lines] == pytest.approx(losses, abs=1e-10)


def plain_loop(config: Config) -> tuple[dict[str, Tensor], list[float]]:
    torch.manual_seed(config.run.seed)
    model = Recurrent().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    texts = Texts()
    losses: list[float] = []
    for step in range(14):
        rows = [torch.tensor(row * CHUNKS + step % CHUNKS) for row in range(ROWS)]
        chosen = torch.stack(rows)
        logits = model(texts.inputs[chosen], step % CHUNKS)
        loss = F.cross_entropy(logits.flatten(0, 1), texts.targets[chosen].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model.state_dict(), losses
