import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from steadfast.config import GptConfig, MlpConfig, Target, TargetTask, TaskConfig
from steadfast.errors import ConfigError, DataError
from steadfast.models import build_model
from steadfast.tasks import IGNORED, build_task

SMALL = GptConfig(num_layers=2, num_heads=2, embed_dim=16, context_length=12)


def gpt(**fields: Any) -> Any:
    torch.manual_seed(0)
    return build_model(SMALL.model_copy(update=fields))


def tokens(batch: int = 3, context: int = 12) -> Tensor:
    return torch.randint(256, (batch, context), generator=torch.Generator().manual_seed(2))


def test_gpt_never_looks_ahead() -> None:
    model, inputs = gpt(), tokens()
    changed = inputs.clone()
    changed[:, 7] += 1
    before, after = model(inputs), model(changed % 256)
    assert before.shape == (3, 12, 256)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_gpt_starts_near_uniform_with_the_weights_of_gpt2() -> None:
    inputs = tokens(8)
    loss = F.cross_entropy(gpt()(inputs).flatten(0, 1), inputs.flatten())
    assert abs(loss.item() - math.log(256)) < 0.1
    model = gpt(embed_dim=64, num_layers=8)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        elif parameter.ndim == 2:
            expected = 0.02 / math.sqrt(16) if "project" in name else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.1), name


def test_gpt_without_bias_has_none_and_dropout_only_trains() -> None:
    assert not any("bias" in name for name, _ in gpt(bias=False).named_parameters())
    model = gpt(dropout=0.5)
    assert not torch.equal(model(tokens()), model(tokens()))
    model.eval()
    assert torch.equal(model(tokens()), model(tokens()))


def test_gpt_submodules_stand_in_forward_order() -> None:
    model, called = gpt(), []
    leaves = [name for name, module in model.named_modules() if not list(module.children())]
    for name in leaves:
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: called.append(name))
    model(tokens())
    assert [name for name in called if not name.endswith("dropout")] == [
        name for name in leaves if not name.endswith("dropout")
    ]
    assert model.blocks() == list(model.layers)


def test_flops_are_those_of_the_matrices_and_attention() -> None:
    model = gpt(bias=False)
    matmul = 2 * (16 * 48 + 16 * 16 + 2 * 16 * 64) + 16 * 256
    norms = 5 * 16
    assert model.flops_per_sample() == 12 * (6 * (matmul + norms) + 12 * 2 * 16 * 12)
    mlp: Any = build_model(MlpConfig(kind="mlp", in_features=5, hidden=(4,), out_features=3))
    assert mlp.flops_per_sample() == 6 * (5 * 4 + 4 + 4 * 3 + 3)
    assert mlp(torch.zeros(2, 1, 5)).shape == (2, 3), "it flattens its inputs"
    assert isinstance(mlp.layers[-1], nn.Linear)


def test_users_model_and_task_come_by_name() -> None:
    linear = build_model(Target(target="torch.nn:Linear", args={"in_features": 2, "out_features": 1}))
    assert isinstance(linear, nn.Linear)
    assert callable(build_task(TargetTask(target="steadfast.tasks:LanguageModeling")).sample)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"model\.target: .*returned a dict, not a torch"):
        build_model(Target(target="builtins:dict"))
    with pytest.raises(ConfigError, match=r"task\.target: .*returned a dict without loss"):
        build_task(TargetTask(target="builtins:dict"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_language_modeling_sums_over_counted_tokens(dtype: torch.dtype) -> None:
    model, inputs = gpt().to(dtype), tokens()
    targets = inputs.clone()
    targets[0, :5] = IGNORED
    sums = build_task(TaskConfig()).loss(model, (inputs, targets))
    kept = targets != IGNORED
    expected = F.cross_entropy(model(inputs)[kept].double(), targets[kept], reduction="sum")
    assert sums.count.item() == 31
    assert sums.loss_sum.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(sums.loss_sum.double(), expected, rtol=1e-5, atol=1e-5)


def test_losses_add_up_over_microbatches() -> None:
    torch.manual_seed(0)
    model, inputs, targets = nn.Linear(4, 3), torch.randn(10, 4), torch.randint(3, (10,))
    for config, batch in (
        (TaskConfig(kind="classification"), (inputs, targets)),
        (TaskConfig(kind="regression"), (inputs, torch.randn(10, 3))),
    ):
        task = build_task(config)
        whole = task.loss(model, batch)
        parts = [task.loss(model, tuple(part[at] for part in batch)) for at in (slice(3), slice(3, 10))]
        torch.testing.assert_close(sum(part.loss_sum for part in parts), whole.loss_sum)
        assert sum(part.count for part in parts) == whole.count == 10
        for name, total in whole.metrics.items():
            assert parts[0].metrics[name] + parts[1].metrics[name] == total  # type: ignore[operator]


def test_regression_is_mean_squared_error_without_broadcasting() -> None:
    model = nn.Linear(4, 1)
    inputs, targets = torch.randn(6, 4), torch.randn(6, dtype=torch.float64)
    sums = build_task(TaskConfig(kind="regression")).loss(model, (inputs, targets))
    expected = F.mse_loss(model(inputs)[:, 0], targets.float())
    torch.testing.assert_close(sums.loss_sum / sums.count, expected)


class Outputs(NamedTuple):
    """What a model of Hugging Face's returns, as far as tasks look."""

    logits: Tensor
    hidden: Tensor


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gpt = gpt()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Outputs:
        assert attention_mask.shape == input_ids.shape
        return Outputs(self.gpt(input_ids), input_ids)


def test_language_modeling_of_a_mapping_predicts_each_label_from_the_tokens_before_it() -> None:
    model, ids = Named(), tokens()
    labels = ids.clone()
    labels[1, 4:8] = IGNORED
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "source": ["a", "b", "c"]}
    named = build_task(TaskConfig()).loss(model, batch)
    plain = build_task(TaskConfig()).loss(model.gpt, (ids[:, :-1], labels[:, 1:]))
    assert named.count == plain.count == 3 * 11 - 4
    torch.testing.assert_close(named.loss_sum, plain.loss_sum)
    with pytest.raises(DataError, match="a batch has no labels, only input_ids, label"):
        build_task(TaskConfig()).loss(model, {"input_ids": ids, "label": labels})
