"""A model that is built without memory begins with the numbers of one that is built the plain way."""

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

import tests.examples.operators  # noqa: F401 - before torchvision
from steadfast.checkpoint.state import named_tensors
from steadfast.config import GptConfig
from steadfast.errors import NotDeferrable
from steadfast.models.gpt import Gpt
from steadfast.parallel.deferred import allocate, build_without_memory

import torchvision  # isort: skip

Build = Callable[[], nn.Module]


class Odd(nn.Module):
    """Fills its parameters in all the ways that models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.embedding = nn.Embedding(5, 4, padding_idx=1)
        nn.init.trunc_normal_(self.first.weight, std=0.02)  # draws until all numbers are small enough
        nn.init.orthogonal_(self.embedding.weight)
        self.first.bias.data = torch.randn(4) * 0.1
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.view = nn.Parameter(torch.eye(3)[:, 1:])
        self.given = nn.Parameter(torch.from_numpy(np.arange(4.0)))
        self.uninitialised = nn.Parameter(torch.empty(3))
        with torch.random.fork_rng():
            torch.manual_seed(99)
            self.seeded = nn.Linear(3, 2)
        self.online = nn.Linear(2, 2)
        self.target = copy.deepcopy(self.online)
        self.other = nn.Linear(2, 2)
        self.other.load_state_dict(self.online.state_dict())
        self.tied = nn.Linear(5, 4, bias=False)
        self.tied.weight = self.embedding.weight
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.recurrent = nn.LSTM(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
        self.luck = random.random()
        self.register_buffer("table", torch.linspace(0, 1, 7).cumsum(0), persistent=False)
        self.attributes = [torch.arange(3) * 2, {"noise": torch.rand(2)}]
        with torch.no_grad():
            self.first.weight[1:3].mul_(2).add_(self.scale[0])
            self.uninitialised.fill_(0.5)
            self.uninitialised[1] = self.online.weight.sum()


def hugging_face(config: transformers.PretrainedConfig, kind: Any) -> nn.Module:
    model: nn.Module = kind.from_config(config)
    return model


def small(kind: type[transformers.PretrainedConfig]) -> transformers.PretrainedConfig:
    return kind(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=50, pad_token_id=0
    )


MODELS: dict[str, Build] = {
    "odd": Odd,
    "gpt": lambda: Gpt(GptConfig(vocab_size=40, embed_dim=16, num_layers=2, num_heads=2, context_length=8)),
    "resnet": torchvision.models.resnet18,
    "vit": partial(torchvision.models.VisionTransformer, 32, 16, 2, 2, 16, 32),
    "llama": lambda: hugging_face(small(transformers.LlamaConfig), transformers.AutoModelForCausalLM),
    "gpt2": lambda: hugging_face(
        transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50), transformers.AutoModelForCausalLM
    ),
    "bert": lambda: hugging_face(small(transformers.BertConfig), transformers.AutoModelForMaskedLM),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_numbers_are_those_of_a_plain_construction(name: str) -> None:
    build = MODELS[name]
    random.seed(1)
    torch.manual_seed(3)
    plain = build()
    random.seed(1)
    torch.manual_seed(3)
    model, values = build_without_memory(build)
    assert all(tensor.is_meta for tensor in named_tensors(model).values())
    assert [*named_tensors(model)] == [*named_tensors(plain)]  # tied ones are one in both
    allocate(model, torch.device("cpu"))
    values.fill(named_tensors(model))
    expected = named_tensors(plain)
    for tensor_name, tensor in named_tensors(model).items():
        assert torch.equal(tensor, expected[tensor_name]), tensor_name
        assert tensor.requires_grad == expected[tensor_name].requires_grad


def test_attributes_have_their_numbers_at_once_and_the_generator_is_left_as_it_was() -> None:
    torch.manual_seed(3)
    plain: Any = Odd()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    model, values = build_without_memory(Odd)
    found: Any = model
    values.fill({"first.bias": torch.empty(4)})
    assert torch.equal(torch.get_rng_state(), state)
    assert found.rates == plain.rates
    assert found.attributes[0].tolist() == [0, 2, 4]
    assert torch.equal(found.attributes[1]["noise"], plain.attributes[1]["noise"])


def test_a_mark_on_a_parameter_stays() -> None:
    def build() -> nn.Module:
        model = nn.Linear(2, 2)
        vars(model.bias)["no_decay"] = True
        return model

    model, _ = build_without_memory(build)
    assert vars(model.bias) == {"no_decay": True}
    assert vars(model.weight) == {}


class Largest(TorchDispatchMode):
    """Looks for the most numbers in a tensor that is computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not (result.is_meta or isinstance(result, FakeTensor)):
            self.numel = max(self.numel, result.numel())
        return result


def wide() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(3)))


def test_nothing_is_computed_while_the_model_is_built() -> None:
    with Largest() as largest:
        build_without_memory(wide)
    assert largest.numel < 10_000  # the state of the generator has 5056 bytes


KEPT: list[Tensor] = []


def keeps_a_tensor() -> nn.Module:
    KEPT[:] = [torch.zeros(2)]
    return nn.Linear(2, 2)


def draws_with_a_generator() -> nn.Module:
    model = nn.Linear(2, 2)
    nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(1))
    return model


def asks_for_an_array() -> nn.Module:
    model = nn.Linear(2, 2)
    model.scale = model.weight.detach().numpy().max()
    return model


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (keeps_a_tensor, "a tensor is kept elsewhere than among parameters, buffers and attributes"),
        (draws_with_a_generator, "random numbers of a generator of its own"),
        (asks_for_an_array, "numpy"),
    ],
)
def test_what_cannot_be_deferred_is_said(build: Build, why: str) -> None:
    with pytest.raises(NotDeferrable, match=why):
        build_without_memory(build)
    KEPT.clear()
