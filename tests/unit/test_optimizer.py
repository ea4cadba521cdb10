"""Which optimizer a configuration makes, and at which rates its groups go."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from steadfast.config import AdamWConfig, ConstantConfig, SgdConfig, parse_config
from steadfast.errors import ConfigError
from steadfast.optim.optimizer import build_optimizer, set_learning_rates
from steadfast.optim.schedule import build_schedule

OURS = "tests.unit.test_optimizer"


def head_at_a_tenth(params: Iterable[nn.Parameter], lr: float, betas: Any) -> torch.optim.Optimizer:
    """As a user writes it: the last two parameters have a rate of their own."""
    *body, weight, bias = params
    groups: list[dict[str, Any]] = [{"params": body}, {"params": [weight, bias], "lr": lr / 10}]
    return torch.optim.Adam(groups, lr=lr, betas=betas)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def test_adam_that_keeps_its_lists_follows_each_change_that_torchs_own_follows() -> None:
    torch.manual_seed(0)
    ours, theirs = model(), model()
    theirs.load_state_dict(ours.state_dict())
    config = AdamWConfig(lr=0.1, weight_decay=0.0)
    kept = build_optimizer(config, ours)
    plain = torch.optim.AdamW(theirs.parameters(), lr=0.1, betas=config.betas, eps=config.eps, weight_decay=0.0)

    scales = itertools.count(1)

    def step(*used: int) -> None:
        scale = 0.1 * next(scales)
        for net, optimizer in ((ours, kept), (theirs, plain)):
            for index, param in enumerate(net.parameters()):
                param.grad = torch.full_like(param, scale * (index + 1)) if index in used else None
            optimizer.step()
        assert all(map(torch.equal, ours.parameters(), theirs.parameters()))

    step(0, 1, 2, 3)
    step(0, 1, 2, 3)
    step(0, 3)  # a step that leaves parameters out
    step(0, 1, 2, 3)
    for net, optimizer in ((ours, kept), (theirs, plain)):  # as a user's hook may reset a moment
        first = next(net.parameters())
        optimizer.state[first]["exp_avg"] = torch.zeros_like(first)
    step(0, 1, 2, 3)
    for optimizer in (kept, plain):
        optimizer.load_state_dict(optimizer.state_dict())
    step(0, 1, 2, 3)
    for optimizer in (kept, plain):
        optimizer.state.clear()
    step(0, 1, 2, 3)


def test_weight_decay_is_for_matrices_only() -> None:
    optimizer = build_optimizer(SgdConfig(lr=0.1, weight_decay=0.3), model())
    assert [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups] == [(0.3, 2), (0.0, 2)]
    assert isinstance(optimizer, torch.optim.SGD)


def test_each_group_of_ones_own_optimizer_keeps_its_rate() -> None:
    words = ["optimizer.lr=0.4", f"optimizer.target={OURS}:head_at_a_tenth", "optimizer.args={betas: [0.8, 0.9]}"]
    config = parse_config("", overrides=words)
    optimizer = build_optimizer(config.optimizer, model())
    schedule = build_schedule(ConstantConfig(warmup_steps=4), num_steps=10)
    assert set_learning_rates(optimizer, schedule, step=2) == pytest.approx(0.2)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.02])
    set_learning_rates(optimizer, schedule, step=9)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.4, 0.04])


def test_what_is_no_optimizer_is_refused_by_name() -> None:
    config = parse_config("", overrides=["optimizer.target=builtins:dict"])
    with pytest.raises(ConfigError, match=r"optimizer.target: .*gave a dict, not a torch.optim.Optimizer"):
        build_optimizer(config.optimizer, model())


def groups_of(*groups: str) -> torch.optim.Optimizer:
    words = ["optimizer.kind=adam", "optimizer.lr=0.4", "optimizer.weight_decay=0.3"]
    config = parse_config("", overrides=[*words, f"optimizer.groups=[{', '.join(groups)}]"])
    return build_optimizer(config.optimizer, model())


def test_parameters_whose_names_match_have_a_rate_and_a_decay_of_their_own() -> None:
    optimizer = groups_of("{match: ^1, lr_scale: 0.1}", "{match: bias, weight_decay: 0.2}")
    assert isinstance(optimizer, torch.optim.Adam)
    found = [(len(group["params"]), group["initial_lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert found == [
        (1, 0.4, 0.3),  # 0.weight
        (0, 0.4, 0.0),
        (1, pytest.approx(0.04), 0.3),  # 1.weight
        (1, pytest.approx(0.04), 0.0),  # 1.bias, which the second group would match too
        (1, 0.4, 0.2),  # 0.bias
    ]


def test_a_group_that_matches_nothing_and_a_pattern_that_is_none_are_refused() -> None:
    with pytest.raises(ConfigError, match=r'optimizer\.groups\.0\.match: "head" is in the name of no parameter'):
        groups_of("{match: head}")
    with pytest.raises(ConfigError, match=r"match: is no regular expression"):
        groups_of("{match: '(', lr_scale: 2.0}")
    tied = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    tied["head"].weight = tied["body"].weight
    with pytest.raises(ConfigError, match=r"matches; head\.weight is the same parameter as body\.weight$"):
        build_optimizer(parse_config("", overrides=["optimizer.groups=[{match: head.weight}]"]).optimizer, tied)
