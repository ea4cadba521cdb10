"""What activation checkpointing keeps, and the models that it can be used with."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from steadfast.config import GptConfig
from steadfast.errors import UsageError
from steadfast.models import build_model
from steadfast.parallel.activations import checkpoint_activations


def kept_bytes(model: nn.Module) -> int:
    """The bytes that a forward keeps for the backward, parameters excluded."""
    held = {param.data_ptr() for param in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in held:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.zeros(2, 64, dtype=torch.int64)).sum().backward()
    return sum(kept.values())


def gpt(how: Any) -> nn.Module:
    torch.manual_seed(1)
    model = build_model(GptConfig(num_layers=4, num_heads=2, embed_dim=32, context_length=64, vocab_size=50))
    checkpoint_activations(model, how)
    return model


def test_the_more_is_computed_again_the_less_is_kept() -> None:
    assert kept_bytes(gpt("full")) < kept_bytes(gpt(2)) < kept_bytes(gpt("none"))


class Products(TorchDispatchMode):
    """Counts the products of layers that are computed."""

    num: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def num_products(how: Any) -> int:
    model = gpt(how)
    with Products() as products:  # type: ignore[no-untyped-call]
        model(torch.zeros(2, 64, dtype=torch.int64)).sum().backward()
    return int(products.num)


def test_what_is_selected_is_not_computed_again() -> None:
    assert num_products("selective") == num_products("none") > 0
    assert num_products("full") > num_products("none")


def test_names_and_the_first_loss_stay_what_they_are() -> None:
    plain, changed = gpt("none"), gpt("full")
    assert list(changed.state_dict()) == list(plain.state_dict())
    tokens = torch.arange(128).reshape(2, 64) % 50
    torch.manual_seed(2)
    expected = plain(tokens)
    torch.manual_seed(2)
    assert torch.equal(changed(tokens), expected)


def test_a_copy_of_the_model_computes_with_its_own_layers() -> None:
    model = gpt("full").eval()
    other = copy.deepcopy(model)
    tokens = torch.zeros(1, 64, dtype=torch.int64)
    before = other(tokens)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert torch.equal(other(tokens), before)


def test_models_whose_layers_cannot_be_checkpointed_are_refused() -> None:
    with pytest.raises(UsageError, match=r"memory\.activation_checkpointing=full: no repeated layers"):
        checkpoint_activations(nn.Linear(2, 2), "full")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].forward = model[0].forward
    with pytest.raises(UsageError, match="the forward of a Linear has been replaced"):
        checkpoint_activations(model, "full")
