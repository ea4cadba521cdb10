"""Which layers a plan splits, and which models cannot be split."""

import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional as F  # noqa: N812
from torch.testing._internal.distributed.fake_pg import FakeStore

from steadfast.config import GptConfig
from steadfast.errors import ConfigError, UsageError
from steadfast.loop.worker_state import WorkerState
from steadfast.models.gpt import Gpt
from steadfast.parallel.dtensor import TENSOR_AXIS, is_split, local, offset_of, on_mesh_of
from steadfast.parallel.tensor import examine_split, layers_of_plan
from steadfast.tasks import Sums
from steadfast.world.runtime import World
from tests.support.reference import CPU
from tests.support.small import small

WIDTH, HIDDEN = 4, 8
PLAN = {"layers.*.up": "column", "layers.*.down": "row"}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def between(self, x: Tensor, hidden: Tensor) -> Tensor:
        return F.gelu(hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(x, self.up(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, layer: type[Layer] = Layer) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.first(x))
        for each in self.layers:
            x = each(x)
        return self.last(x)  # type: ignore[no-any-return]


def examine(model: nn.Module, size: int = 2) -> None:
    layers = layers_of_plan(model, PLAN, size)
    examine_split(model, layers, size, lambda: Sums(model(torch.ones(2, WIDTH)).sum(), 2), CPU)


def zero(model: nn.Module) -> nn.Module:
    """Return the model with zeros for parameters, as one that has no memory yet."""
    for param in model.parameters():
        param.detach().zero_()
    return model


@pytest.mark.parametrize("size", [2, 4, 8])
def test_layers_that_keep_features_apart_can_be_split(size: int) -> None:
    examine(zero(Net()), size)


def test_our_gpt_has_a_plan_that_keeps_heads_whole() -> None:
    config = GptConfig(num_layers=2, num_heads=4, embed_dim=8, context_length=5, vocab_size=7, dropout=0.1)
    model = Gpt(config.replace("attention_dropout", 0.0))
    layers = layers_of_plan(model, None, 4)
    assert [name for name, kind in layers.items() if kind == "row"] == [
        *("layers.0.attention.project", "layers.1.attention.project"),
        *("layers.0.project", "layers.1.project"),
    ]
    tokens = torch.ones(2, 5, dtype=torch.int64)
    examine_split(zero(model), layers, 4, lambda: Sums(model(tokens).sum(), 2), CPU)


def test_layers_of_hugging_faces_plan_are_split_and_its_head_stays_whole() -> None:
    model: Any = Net()
    styles = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "last": "colwise_gather_output"}
    model._tp_plan = {**styles, "first": "embedding_rowwise"}
    assert layers_of_plan(model, None, 2) == layers_of_plan(model, PLAN, 2)


@pytest.mark.parametrize(
    ("plan", "size", "message"),
    [
        ({**PLAN, "*.gate": "column"}, 2, "parallel.plan: *.gate matches no module of the model; it has first, "),
        (PLAN, 3, "layers.0.up has 8 outputs, which parallel.tensor_size=3 does not divide"),
        ({**PLAN, "layers.1.*": "column"}, 2, "layers.1.down is matched as column and as row"),
        ({**PLAN, "dropout": "column"}, 2, "dropout is a Dropout, and only nn.Linear can be split"),
        ({"*.up": "column"}, 2, "needs layers of both kinds"),
        (None, 2, "the model has no plan of its own. Give parallel.plan"),
    ],
)
def test_a_plan_that_does_not_fit_the_model_is_refused(plan: dict[str, str] | None, size: int, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        layers_of_plan(Net(), plan, size)


def test_a_model_whose_weights_are_tied_or_whose_style_is_not_known_is_refused() -> None:
    model: Any = Net()
    model._tp_plan = {"layers.*.up": "colwise", "layers.*.experts": "grouped_gemm"}
    with pytest.raises(UsageError, match=r"has grouped_gemm for layers\.\*\.experts. Give parallel\.plan"):
        layers_of_plan(model, None, 2)
    model.last.weight = model.layers[0].up.weight
    with pytest.raises(UsageError, match=r"layers\.0\.up shares its weights with last"):
        layers_of_plan(model, PLAN, 2)


class Scaled(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def between(self, x: Tensor, hidden: Tensor) -> Tensor:
        return hidden * self.scale


class Leaking(Layer):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return x + self.down(hidden) + hidden.sum(-1, keepdim=True)  # type: ignore[no-any-return]


class Whole(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.cat([x, x], -1))  # type: ignore[no-any-return]


class Counting(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def between(compute: Callable[[Tensor, Tensor], Tensor]) -> type[Layer]:
    """Return a layer that computes this of its input and of its column's results."""
    return type("Between", (Layer,), {"between": lambda self, x, hidden: compute(x, hidden)})


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            between(lambda x, hidden: F.dropout(hidden, 0.1)),
            "random numbers are drawn between a column and its row layers.0.down, as by dropout",
        ),
        (
            between(lambda x, hidden: F.layer_norm(hidden, hidden.shape[-1:])),
            "row layers.0.down each feature's result depends on features of other parts",
        ),
        (Scaled, "layers.0.scale is used between a column and its row layers.0.down"),
        (
            between(lambda x, hidden: hidden * x.sum(-1, keepdim=True)),
            "is used between a column and its row layers.0.down",
        ),
        # As some attention knows its heads.
        (between(lambda x, hidden: hidden * torch.arange(hidden.shape[-1])), "or on its number among all"),
        (
            between(lambda x, hidden: hidden.view(len(hidden), HIDDEN)),
            "its code does not work with 1/2 of the features",
        ),
        (Leaking, "the results of its column layers.0.up are used beyond a row"),
        (Whole, "its row layers.0.down takes no results of a column"),
        (Counting, "a forward changes its buffer layers.0.norm."),
    ],
)
def test_layers_that_would_compute_something_else_are_refused(layer: type[Layer], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        examine(Net(layer))


@pytest.mark.parametrize("kind", ["fsdp", "pipeline"])
def test_a_worker_refuses_a_plan_that_does_not_fit_its_model(kind: str) -> None:
    plan = "{layers.*.expand: column, layers.*.attention.project: row}"
    parallel = f"parallel={{kind: {kind}, tensor_size: 2, plan: {plan}}}"
    with pytest.raises(UsageError, match=re.escape("its row layers.0.attention.project takes no results of a column")):
        WorkerState(small("nowhere", parallel, "model.attention_dropout=0"), CPU)


PIPELINE = "parallel.kind=pipeline"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([PIPELINE, "parallel.tensor_size=2"], "model.attention_dropout: must be 0 with parallel.tensor_size"),
        ([PIPELINE, "parallel.plan={'*.up': column}"], "plan needs a tensor_size of at least 2"),
        ([PIPELINE, "parallel.tensor_size=2", "parallel.plan={'*.up': column}"], "layers of both kinds"),
        (
            [PIPELINE, "parallel.tensor_size=2", "model.attention_dropout=0", "scaling.num_workers=[5, 7]"],
            "parallel.stages x parallel.tensor_size: no number of workers",
        ),
        (
            [PIPELINE, "parallel.tensor_size=2", "model.attention_dropout=0", "optimizer={kind: muon}"],
            "must be without tensor_size with optimizer.kind=muon",
        ),
        (["parallel.tensor_size=2"], "model.attention_dropout: must be 0 with parallel.tensor_size"),
        (["parallel.tensor_size=3", "model.attention_dropout=0"], "model.num_heads: must be a multiple of"),
        (["parallel.tensor_size=2", "parallel.cpu_offload=true"], "cpu_offload must be false with tensor_size"),
        (["parallel.plan={'*.up': column}"], "plan needs a tensor_size of at least 2"),
        (["parallel.tensor_size=2", "parallel.plan={'*.up': column}"], "layers of both kinds"),
        (["parallel.shard_size=1"], "shard_size must be at least 2 without tensor_size"),
        (["parallel.tensor_size=2", "batch.balance=speed"], "must be even or weights by label"),
        (["parallel.tensor_size=2", "batch.microbatch_size=auto"], "must be a number with parallel.tensor_size"),
        (["parallel.tensor_size=2", "model.attention_dropout=0", "scaling.num_workers=3"], "is a multiple of it"),
    ],
)
def test_keys_that_exclude_each_other_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        small("nowhere", "parallel.kind=fsdp", *words)


def worlds_of_eight(**sizes: int) -> list[World]:
    return [World(rank, 8, 1, SimpleNamespace(), **sizes) for rank in range(8)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "sizes", "data_ranks", "counts"),
    [
        ("shard", {}, [0, 0, 1, 1, 2, 2, 3, 3], [True, False] * 4),
        ("stage", {"stages": 2}, [0, 0, 0, 0, 1, 1, 1, 1], [False, False, True, False] * 2),
    ],
)
def test_ranks_with_one_part_are_a_line_and_one_of_those_that_read_the_same_samples_counts(
    kind: Literal["shard", "stage"], sizes: dict[str, int], data_ranks: list[int], counts: list[bool]
) -> None:
    worlds = worlds_of_eight(replica_size=4, tensor_size=2, **sizes)
    assert [world.data_rank for world in worlds] == data_ranks
    assert [getattr(world, kind) for world in worlds] == [0, 0, 1, 1] * 2
    assert [world.counts for world in worlds] == counts
    assert worlds[7].lines("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert worlds[7].lines(kind) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert worlds[7].lines("replicate") == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("replicas", [(False, True), (True, False), (True, True), (False, False)], ids=str)
def test_parts_of_the_last_world_keep_their_places_with_any_number_of_replicas(
    eight_ranks: None, replicas: tuple[bool, bool]
) -> None:
    """Of a layer split by outputs and sharded, and of the moments of it."""
    held, like = (part_of_a_column(has_replicas) for has_replicas in replicas)
    moved = on_mesh_of(held, like)
    assert isinstance(moved, DTensor)
    assert moved.placements == like.placements
    assert offset_of(moved) == (6, 0)  # the second shard of the second part
    assert local(moved).data_ptr() == local(held).data_ptr()
    assert is_split(moved)


def part_of_a_column(has_replicas: bool) -> DTensor:
    """Return what rank 3 of 2 shards x 2 parts holds of a matrix of 8 rows."""
    sizes, names = [2, 2], ["here", f"here{TENSOR_AXIS}"]
    if has_replicas:
        sizes, names = [2, *sizes], ["here-replicas", *names]
    ranks = torch.arange(8)[: 2 ** len(sizes)].view(sizes)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=tuple(names))
    placements = [*[Replicate()] * has_replicas, _StridedShard(0, split_factor=2), Shard(0)]
    return DTensor.from_local(
        torch.rand(2, 3), mesh, placements, run_check=False, shape=torch.Size((8, 3)), stride=(3, 1)
    )
