"""Hooks change which parameters require a gradient: the run trains what a plain loop over all parameters trains."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from steadfast.config import Config, parse_config
from steadfast.tasks import Sums
from tests.support.claims import check_equal, check_identical
from tests.support.drill import drill
from tests.support.gang import MemberFailed

STEPS = 12
RUN = """
batch: {global_size: 8, microbatch_size: 2}
model: {target: "tests.dist.test_unfreezing:frozen_net"}
task: {target: "tests.dist.test_unfreezing:squared_error"}
data: {target: "tests.dist.test_unfreezing:Points", validation_fraction: 0, order: sequential, num_workers: 0}
schedule: {kind: constant}
precision: {kind: fp64}
recovery: {spike: null}
trackers: []
"""
ADAM = "optimizer={target: torch.optim:Adam, lr: 0.01, max_grad_norm: null}"
NADAM = ADAM.replace("Adam", "NAdam")  # begins with other numbers than zeros
SGD = "optimizer={kind: sgd, lr: 0.05, momentum: 0.9, max_grad_norm: null}"
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    ADAM: lambda params: torch.optim.Adam(params, lr=0.01),
    NADAM: lambda params: torch.optim.NAdam(params, lr=0.01),
    SGD: lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
}


class Points:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._x, self._y = torch.randn(96, 4, generator=generator), torch.randn(96, 1, generator=generator)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        return self._x[index], self._y[index]


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
    x, y = batch
    return Sums(mse_loss(model(x), y, reduction="sum"), len(y))


def frozen_net() -> nn.Sequential:
    """Return a network of which only the last layer trains."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    net[:4].requires_grad_(False)
    return net


class Gradual:
    """Unfreezes one layer after another, as ULMFiT does, and freezes the head for some steps, in `on_step` alone."""

    def on_step(self, run: Any) -> None:
        changes = {2: (2, True), 4: (4, False), 6: (0, True), 10: (4, True)}
        if run.step in changes:
            layer, trains = changes[run.step]
            run.model[layer].requires_grad_(trains)


class Alternating:
    """Trains two layers in turn, as a GAN does, and sets that at the start of each attempt too."""

    def on_start(self, run: Any) -> None:
        run.model[0].requires_grad_(run.step % 2 == 1)
        run.model[4].requires_grad_(run.step % 2 == 0)

    on_step = on_start


class OnOneRank:
    """Unfreezes another layer on each rank."""

    def on_step(self, run: Any) -> None:
        run.model[2 * run.rank].requires_grad_(run.step > 1)


class OwnGroup:
    """Gives a layer a parameter group of its own, as Lightning's BackboneFinetuning does."""

    def on_step(self, run: Any) -> None:
        if run.step == 2:
            run.optimizer.add_param_group({"params": run.model[2].requires_grad_(True).parameters(), "lr": 0.001})


def plain_loop(hook: type[Any], optimizer: str) -> dict[str, Tensor]:
    """Return the weights of a plain loop over all parameters."""
    data, net = Points(), frozen_net().double()
    updates = OPTIMIZERS[optimizer](net.parameters())
    run = SimpleNamespace(model=net, step=0)
    hooks = hook()
    getattr(hooks, "on_start", lambda run: None)(run)
    for step in range(STEPS):
        updates.zero_grad()
        rows = slice(8 * step, 8 * step + 8)
        (squared_error(net, (data._x[rows].double(), data._y[rows].double())).loss_sum / 8).backward()
        updates.step()
        run.step = step + 1
        hooks.on_step(run)
    return dict(net.state_dict())


def config_of(folder: Path, hook: type[Any], optimizer: str, *words: str) -> Config:
    target = f"hooks=[{{target: 'tests.dist.test_unfreezing:{hook.__name__}'}}]"
    overrides = [f"run.storage={folder}", "run.name=small", f"run.steps={STEPS}", target, optimizer, *words]
    return parse_config(RUN, "unfreezing.yaml", overrides)


@pytest.mark.parametrize(
    ("hook", "kind", "optimizer"),
    [(Gradual, "ddp", NADAM), (Gradual, "fsdp", ADAM), (Alternating, "ddp", SGD), (Alternating, "fsdp", ADAM)],
)
def test_what_hooks_unfreeze_trains_as_in_a_plain_loop_through_resizes_and_a_stop(
    tmp_path: Path, hook: type[Any], kind: str, optimizer: str
) -> None:
    """The second world has a newcomer, and the last ones read a checkpoint that holds more than a new model's state."""
    config = config_of(tmp_path, hook, optimizer, f"parallel.kind={kind}")
    drill(config, worlds=[2, [2, 0]], leave_after=[2], stop_after=3)
    run = drill(config, worlds=[1, 2], leave_after=[1])
    check_equal(run.weights, plain_loop(hook, optimizer))


def test_an_exact_run_that_unfreezes_has_the_same_bits_in_every_world(tmp_path: Path) -> None:
    words = ("run.exact=true", "precision.kind=fp32")
    alone = drill(config_of(tmp_path / "alone", Gradual, ADAM, *words), worlds=[1])
    run = drill(config_of(tmp_path / "worlds", Gradual, ADAM, *words), worlds=[2, [2, 0], 1], leave_after=[3, 2])
    check_identical(run, alone)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("checkpoint.trainable_only=true", "checkpoint.trainable_only leaves it out of checkpoints"),
        ("parallel.reducer=torch", "parallel.kind=ddp .* has no gradient of it"),
        ("hooks=[{target: 'tests.dist.test_unfreezing:Gradual'}, {kind: ema}]", "the hook ema has no average of it"),
        (
            "hooks=[{target: 'tests.dist.test_unfreezing:OwnGroup'}]",
            "a hook has given the optimizer a group for it, .*",
        ),
    ],
)
def test_an_unfreezing_that_cannot_be_carried_is_refused_by_the_name_of_the_parameter(
    tmp_path: Path, words: str, why: str
) -> None:
    said = f"the parameter 2.weight was frozen when the model was built, and is not at step 3: {why}. Build the model"
    with pytest.raises(MemberFailed, match=said):
        drill(config_of(tmp_path, Gradual, ADAM, words), worlds=[1])


def test_ranks_that_unfreeze_different_parameters_are_refused(tmp_path: Path) -> None:
    said = r"before step 3 hooks of some ranks have unfrozen [02]\.weight, of others not"
    with pytest.raises(MemberFailed, match=said):
        drill(config_of(tmp_path, OnOneRank, ADAM), worlds=[2])
