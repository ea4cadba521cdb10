"""What a forward shows of a model, and which models cannot be cut into stages."""

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steadfast.config import GptConfig
from steadfast.errors import UsageError
from steadfast.models.gpt import Gpt
from steadfast.parallel.stages import cut, examine, held_elsewhere, keep_only
from steadfast.tasks import Sums
from tests.support.reference import CPU

WIDTH = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Any:
        return x @ self.weight if shift is None else x @ self.weight + shift


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.last = nn.Linear(WIDTH, 1)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(self.between(x))
        return self.last(x)  # type: ignore[no-any-return]


def loss_of(model: nn.Module) -> Sums:
    return Sums(model(torch.ones(2, WIDTH)).sum(), 2)


def test_a_forward_shows_layers_and_what_lies_around_them() -> None:
    model = Gpt(GptConfig(num_layers=3, num_heads=2, embed_dim=4, context_length=5, vocab_size=7))
    outline = examine(model, lambda: Sums(model(torch.ones(2, 5, dtype=torch.int64)).sum(), 2), CPU)
    assert outline.blocks == ("layers.0", "layers.1", "layers.2")
    assert outline.before == ("embed.weight", "position.weight")
    assert outline.after == ("norm.weight", "norm.bias", "head.weight")


def test_a_stage_has_its_own_parameters_and_the_names_of_the_others() -> None:
    model = Net()
    names = [name for name, _ in model.named_parameters()]
    outline = examine(model, lambda: loss_of(model), CPU)
    first, last = outline.stages(model, [(0, 2), (2, 3)])
    assert first | last == set(model.parameters())
    keep_only(model, last, CPU)
    own = [name for name, _ in model.named_parameters()]
    assert own == ["layers.2.weight", "last.weight", "last.bias"]
    assert sorted([*own, *held_elsewhere(model)]) == sorted(names)
    assert model.first.weight.isnan().all()
    assert model.first.weight.untyped_storage().nbytes() == 4


@pytest.mark.parametrize(
    ("num", "stages", "balance", "expected"),
    [
        (4, 2, None, [(0, 2), (2, 4)]),
        (5, 3, None, [(0, 2), (2, 4), (4, 5)]),  # the last stage also has the head
        (4, 2, (1, 3), [(0, 1), (1, 4)]),
    ],
)
def test_layers_are_cut_evenly_or_as_told(
    num: int, stages: int, balance: tuple[int, ...] | None, expected: list[tuple[int, int]]
) -> None:
    assert cut(num, stages, balance) == expected


@pytest.mark.parametrize(
    ("num", "balance", "why"),
    [(1, None, "only 1 repeated layer"), (3, (1, 1), "must be the model's 3 repeated layers")],
)
def test_too_few_layers_and_a_wrong_balance_are_refused(num: int, balance: tuple[int, ...] | None, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        cut(num, 2, balance)


class Normalised(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)

    def between(self, x: Tensor) -> Tensor:
        normal: Tensor = self.norm(x)
        return normal


class Scaled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def between(self, x: Tensor) -> Tensor:
        return x * self.scale


class DrawsInPython(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_forward_hook(lambda layer, args, found: found * random.random())


class TwoOutputs(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].register_forward_hook(lambda layer, args, found: (found, found))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](self.first(x)))
        return self.last(self.layers[2](x)[0])  # type: ignore[no-any-return]


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(1, 1, bias=False)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Normalised, "changes its buffer norm.num_batches_tracked, as BatchNorm does"),
        (Scaled, "the input of its layer layers.1 is not computed from the output of the layer before it alone"),
        (DrawsInPython, "layers.1 draws numbers from the generators of Python or numpy"),
        (TwoOutputs, "layers.2 returns something else than one tensor"),
        (Unused, "spare.weight is used by no layer"),
        (lambda: nn.Sequential(nn.Linear(WIDTH, 1)), "no repeated layers are found"),
    ],
)
def test_a_model_that_stages_would_train_differently_is_refused(kind: Callable[[], nn.Module], why: str) -> None:
    model = kind()
    with pytest.raises(UsageError, match=re.escape(why)):
        examine(model, lambda: loss_of(model), CPU)


def intermediate(net: Net, x: Tensor) -> Any:
    x = net.layers[0](net.first(x))
    return net.last(net.layers[2](net.layers[1](x)) + x)


def shifted(net: Net, x: Tensor) -> Any:
    x = net.first(x)
    for layer in net.layers:
        x = layer(x, net.last.bias)
    return net.last(x)


FORWARDS: dict[str, Callable[[Net, Tensor], Any]] = {
    "first.weight is used before the first and after the last layer, as tied weights are": lambda net, x: (
        Net.forward(net, x) @ net.first.weight[:1]
    ),
    "layers.1.weight belongs to a layer and is also used after the last layer": lambda net, x: (
        Net.forward(net, x) + net.layers[1].get_parameter("weight").square().sum()
    ),
    "the loss also uses the input or output of a layer": intermediate,
    "layers.0 takes a second argument that depends on trained parameters": shifted,
    "random numbers are drawn between its layers, before layers.1": lambda net, x: net.last(
        net.layers[2](net.layers[1](net.layers[0](net.first(x)) * torch.rand(())))
    ),
    "does not run its layer layers.1": lambda net, x: net.last(net.layers[2](net.layers[0](net.first(x)))),
    "layers.0 runs twice": lambda net, x: Net.forward(net, x) - Net.forward(net, x),
}


@pytest.mark.parametrize("why", FORWARDS)
def test_a_forward_that_stages_would_compute_differently_is_refused(why: str) -> None:
    model = Net()
    model.forward = lambda x: FORWARDS[why](model, x)
    with pytest.raises(UsageError, match=re.escape(why)):
        examine(model, lambda: loss_of(model), CPU)
