"""Blocks of a model, which FSDP gathers one at a time."""

from typing import Any

import pytest
from torch import nn

from steadfast.errors import UsageError
from steadfast.parallel.blocks import blocks_of, modules_of_classes, modules_of_size


class Block(nn.Sequential):
    def __init__(self, width: int = 4) -> None:
        super().__init__(nn.Linear(width, width), nn.ReLU())


class Own(nn.Module):
    """Has what is repeated in `parts`, and beside it more repetition that is smaller."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        self.small = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        for name, part in parts.items():
            setattr(self, name, part)


class Naming(Own):
    def blocks(self) -> list[nn.Module]:
        return [self.small[0]]


class OfHuggingFace(Own):
    _no_split_modules = ("Block",)


def blocks() -> list[Block]:
    return [Block(), Block(), Block()]


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (Naming(large=nn.ModuleList(blocks())), ["small.0"]),
        (OfHuggingFace(a=Block(), b=nn.Linear(9, 9), c=Block()), ["a", "c"]),
        (OfHuggingFace(b=nn.ModuleList([nn.Linear(9, 9), nn.Linear(9, 9)])), ["b.0", "b.1"]),
        (Own(blocks=nn.Sequential(*blocks())), ["blocks.0", "blocks.1", "blocks.2"]),
        (Own(layers=nn.ModuleList(blocks()), head=nn.Linear(99, 99)), ["layers.0", "layers.1", "layers.2"]),
        # A list of lists has no forward to be gathered for; what is in it has.
        (
            Own(deep=nn.ModuleList([nn.ModuleList(blocks()), nn.ModuleList([Block()])])),
            [f"deep.0.{n}" for n in range(3)],
        ),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), []),
        (nn.Sequential(nn.Linear(4, 4)), []),
    ],
)
def test_what_is_repeated_is_gathered_one_at_a_time(model: nn.Module, found: list[str]) -> None:
    names = {module: name for name, module in model.named_modules()}
    assert [names[block] for block in blocks_of(model)] == found


def test_modules_are_found_by_class_and_by_size() -> None:
    model = Own(layers=nn.ModuleList([Block(), Block()]), head=nn.Linear(9, 9))
    names = {module: name for name, module in model.named_modules()}
    of_class = [names[module] for module in modules_of_classes(model, ["Block", "Linear"])]
    assert {"layers.0", "layers.1", "head"} <= {*of_class}
    assert of_class.index("layers.0.0") < of_class.index("layers.0")  # inner ones are sharded first
    assert [names[module] for module in modules_of_size(model, 90)] == ["head"]
    with pytest.raises(UsageError, match=r"parallel.wrap: the model has no module of a class Blok; it has Block, "):
        modules_of_classes(model, ["Blok"])


def test_parts_that_share_a_parameter_are_gathered_with_the_rest() -> None:
    same = Block()
    other = Block()
    tied = Own(layers=nn.ModuleList([same, other, same]))
    assert blocks_of(tied) == [other]
    other[0].weight = tied.small[0].weight
    assert blocks_of(tied) == []
