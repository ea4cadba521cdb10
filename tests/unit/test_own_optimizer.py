"""Which optimizers may be named by `target`, and that those train and resume as in a plain loop."""

import inspect
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from steadfast.checkpoint.state import ModelState, NamedOptimizer, State, app_state, copy_state, flatten
from steadfast.config import CosineConfig, TargetOptimizer
from steadfast.errors import ConfigError
from steadfast.optim.optimizer import build_optimizer, refuse_sparse, set_learning_rates
from steadfast.optim.optimizer_trial import try_optimizer
from steadfast.optim.schedule import build_schedule

OURS = "tests.support.optimizers"
CPU = torch.device("cpu")
NUM_STEPS = 30
SCHEDULE = build_schedule(CosineConfig(warmup_steps=6), NUM_STEPS)


class Row(NamedTuple):
    """An optimizer of torch, and what is expected of it."""

    name: str
    options: Mapping[str, Any] = MappingProxyType({})
    refused: str = ""  # in the message, "" if it is accepted
    refused_if_sharded: str = ""


DECAY = {"weight_decay": 0.1}
WHOLE = "needs whole tensors for its updates"
TABLE = [
    Row("ASGD", {**DECAY, "t0": 3.0}),
    Row("ASGD", {"maximize": True}),
    Row("Adadelta", {**DECAY, "maximize": True}),
    Row("Adafactor", DECAY, refused_if_sharded=WHOLE),
    Row("Adagrad", DECAY),
    Row("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    Row("Adam", DECAY),
    Row("Adam", {"amsgrad": True, "maximize": True}),
    Row("AdamW", DECAY),
    Row("AdamW", {"amsgrad": True}),
    Row("Adamax", DECAY),
    Row("LBFGS", refused="LBFGS needs a closure"),
    Row("Muon", DECAY, refused_if_sharded=WHOLE),
    Row("Muon", {"nesterov": False}, refused_if_sharded=WHOLE),
    Row("NAdam", DECAY),
    Row("NAdam", {**DECAY, "decoupled_weight_decay": True, "maximize": True}),
    Row("RAdam", DECAY),
    Row("RAdam", {**DECAY, "decoupled_weight_decay": True}),
    Row("RMSprop", DECAY),
    Row("RMSprop", {"centered": True, "momentum": 0.9}),
    Row("Rprop"),
    Row("Rprop", {"maximize": True}),
    Row("SGD", DECAY),
    Row("SGD", {"momentum": 0.9}),
    Row("SGD", {**DECAY, "momentum": 0.9, "nesterov": True, "maximize": True}),
    Row("SGD", {"momentum": 0.9, "dampening": 0.5}),
    Row("SparseAdam", refused="SparseAdam needs sparse gradients"),
]
IDS = ["-".join([row.name, *row.options]) for row in TABLE]


class Model(nn.Module):
    """Vectors, matrices and a kernel; or matrices alone, for Muon."""

    def __init__(self, only_matrices: bool = False) -> None:
        super().__init__()
        shapes = [(5, 4), (3, 5)] if only_matrices else [(5, 4), (5,), (3, 5), (3, 2, 2, 2), ()]
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes)


def of_torch(row: Row) -> tuple[TargetOptimizer, Callable[[], Model]]:
    config = TargetOptimizer(target=f"torch.optim:{row.name}", args=dict(row.options), lr=0.02)

    def model() -> Model:
        torch.manual_seed(3)
        return Model(only_matrices=row.name == "Muon")

    return config, model


def attempt(config: TargetOptimizer, model: nn.Module, sharded: bool = False) -> None:
    try_optimizer(config, model, CPU, torch.float32, sharded)


def test_table_has_every_optimizer_of_torch() -> None:
    found = {
        name
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer)
    }
    assert found - {"Optimizer"} == {row.name for row in TABLE}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("row", TABLE, ids=IDS)
def test_optimizer_of_torch_is_accepted_or_refused_by_name(row: Row, sharded: bool) -> None:
    config, model = of_torch(row)
    expected = row.refused or (row.refused_if_sharded if sharded else "")
    if not expected:
        attempt(config, model(), sharded)
        return
    with pytest.raises(
        ConfigError, match=rf'^optimizer\.target: "torch\.optim:{row.name}" (?={row.name} ).*{expected}.*$'
    ):
        attempt(config, model(), sharded)


@pytest.mark.parametrize("row", [row for row in TABLE if not row.refused], ids=lambda row: "-".join([row[0], *row[1]]))
def test_accepted_optimizer_equals_a_plain_loop_over_resumes(row: Row) -> None:
    """Resumes come before the first step, and in the midst of warm-up, where one parameter has not been used yet."""
    config, build = of_torch(row)
    plain = build()
    optimizer = getattr(torch.optim, row.name)(plain.parameters(), lr=config.lr, **row.options)
    take_steps(plain, optimizer, 1, NUM_STEPS)

    model, resumed, state = begin(config, build())
    before = flatten(state).keys()
    for first, last in ((1, 4), (5, 15), (16, NUM_STEPS)):
        held = copied(state)
        model, resumed, state = begin(config, build())
        copy_state(held, state)
        take_steps(model, resumed, first, last)
        assert flatten(state).keys() == before
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        for key, value in optimizer.state[other].items():
            if isinstance(value, Tensor):
                assert torch.allclose(resumed.state[param][key], value, rtol=1e-9, atol=1e-12), key


def begin(config: TargetOptimizer, model: Model) -> tuple[Model, torch.optim.Optimizer, State]:
    """As a worker begins: with live references to all state before the first step."""
    optimizer = build_optimizer(config, model)
    named = NamedOptimizer(model, optimizer)
    return model, optimizer, app_state({"model": ModelState(model, False), "optimizer": named})


def copied(state: State) -> State:
    """What a checkpoint would hold."""
    return {name: {key: value.clone() for key, value in flatten(part).items()} for name, part in state.items()}


def take_steps(model: Model, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    peak = optimizer.defaults["lr"]
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", peak)
    for step in range(first, last + 1):
        generator = torch.Generator().manual_seed(step)
        for index, param in enumerate(model.parameters()):
            gradient = torch.randn(param.shape, generator=generator, dtype=param.dtype)
            param.grad = None if index == 1 and step < 8 else gradient  # used late
        set_learning_rates(optimizer, SCHEDULE, step)
        optimizer.step()


def ours(name: str) -> TargetOptimizer:
    return TargetOptimizer(target=f"{OURS}:{name}", lr=0.02)


@pytest.mark.parametrize("name", ["Plainest", "TowardsStart", "OnlySingles", "last_two_slower", "exactly_five"])
@pytest.mark.parametrize("sharded", [False, True])
def test_optimizer_that_resumes_exactly_is_accepted(name: str, sharded: bool) -> None:
    attempt(ours(name), Model(), sharded)


def test_optimizer_that_normalizes_by_whole_tensors_is_refused_where_they_are_sharded() -> None:
    attempt(ours("Normalized"), Model())
    with pytest.raises(ConfigError, match="Normalized needs whole tensors for its updates, and under fsdp"):
        attempt(ours("Normalized"), Model(), sharded=True)


CANNOT = "cannot continue from a checkpoint, which holds only tensors in an optimizer's state"
REFUSED = {
    "Counting": f"Counting {CANNOT}: it also keeps num_steps in its state, as a number",
    "CountingInGroups": f"CountingInGroups {CANNOT}: it also keeps k in param_groups",
    "CountingByItself": f"CountingByItself {CANNOT}: it also keeps calls as an attribute",
    "Listing": f"Listing {CANNOT}: its updates depend on more than these",
    "TowardsConstruction": f"TowardsConstruction {CANNOT}: its updates depend on more than these",
    "Noisy": "Noisy draws random numbers in its steps, and each worker would draw different ones",
    "DrawingByPython": "DrawingByPython draws random numbers in its steps, and each worker would draw different ones",
    "Sam": "Sam needs a closure, that is several forwards in a step; a step here has one. Take another optimizer",
    "Failing": "Failing fails in a step on small parameters: ValueError: no kernel for it",
}


@pytest.mark.parametrize("name", REFUSED)
def test_optimizer_that_would_train_differently_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError) as raised:
        attempt(ours(name), Model())
    assert str(raised.value) == f'optimizer.target: "{OURS}:{name}" {REFUSED[name]}'


def test_trial_leaves_generators_and_parameters_as_they_were() -> None:
    model = Model()
    before = [param.detach().clone() for param in model.parameters()]
    torch.manual_seed(7)
    random.seed(7)
    expected = torch.rand(1), random.random()
    torch.manual_seed(7)
    random.seed(7)
    attempt(ours("TowardsStart"), model)
    assert (torch.rand(1), random.random()) == expected
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert all(param.grad is None for param in model.parameters())


def test_trial_of_a_large_model_takes_each_number_of_dimensions() -> None:
    """Muon refuses the one vector amid many matrices."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(2, 2)) for _ in range(80)])
    config = TargetOptimizer(target="torch.optim:Muon")
    attempt(config, model)
    model[40] = nn.Parameter(torch.zeros(2))
    with pytest.raises(ConfigError, match=r"fails on small parameters: ValueError: Muon only supports 2D parameters"):
        attempt(config, model)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_layer_with_sparse_gradients_is_refused_by_name(kind: type[nn.Module]) -> None:
    model = nn.Sequential(kind(5, 4, sparse=True), nn.Linear(4, 2))
    with pytest.raises(ConfigError, match=rf"its layer 0 has sparse=True, .* Build the {kind.__name__} with sparse="):
        refuse_sparse(model)
    model[0].requires_grad_(False)
    refuse_sparse(model)
    refuse_sparse(nn.Sequential(kind(5, 4)))
