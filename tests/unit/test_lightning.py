"""`fit_module`: what is read from a LightningModule, and what is refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

import tests.examples.operators  # noqa: F401 - Lightning imports torchvision
from steadfast import Config
from steadfast.errors import UsageError
from steadfast.lightning import ModuleTask, _configured, _Schedule, _settings_of, fit_module

lightning = pytest.importorskip("lightning")


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("share", 0.25, prog_bar=True)
        loss: Tensor = (self.layer(batch[0]) ** 2).mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.3, betas=(0.8, 0.9))


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Hooked(Module):
    def on_train_epoch_end(self) -> None:
        pass


class OwnStep(Module):
    def optimizer_step(self, *arguments: Any) -> None:
        pass


class Annealed(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx) * min(1.0, self.global_step / 100)
        return loss


class Alternating(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (2 if batch_idx % 2 else 1)


class Hidden(torch.optim.SGD):
    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)


class Losses(Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_dict({"first_loss": 1.0, "second_loss": 2.0})


class Silent(Module):
    def training_step(self, batch: Any) -> None:  # type: ignore[override]
        pass


DATA = TensorDataset(torch.zeros(32, 4))


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Manual, "automatic_optimization=False"),
        (Hooked, r"Hooked\.on_train_epoch_end would not be called"),
        (OwnStep, r"OwnStep\.optimizer_step would not be called"),
        (lambda: nn.Linear(4, 1), "takes a LightningModule"),
    ],
)
def test_what_would_train_differently_is_refused_by_name(kind: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        fit_module(Config(), kind(), dataset=DATA)


def sgd(module: Module, **settings: Any) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1, **settings)


def plateau(module: Module) -> dict[str, Any]:
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer := sgd(module))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}


def one_cycle(module: Module) -> tuple[list[Any], list[Any]]:
    optimizer = sgd(module, momentum=0.9)
    return [optimizer], [lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)]


OPTIMIZERS: dict[str, Callable[[Module], Any]] = {
    "returns 2 optimizers": lambda module: [sgd(module), sgd(module)],
    "makes 2 groups of parameters": lambda module: torch.optim.SGD(
        [{"params": [param]} for param in module.parameters()], lr=0.1
    ),
    r"leaves out layer\.bias": lambda module: torch.optim.SGD([module.layer.weight], lr=0.1),
    "ReduceLROnPlateau does not follow from the step alone": plateau,
    "set cycle_momentum=False": one_cycle,
    "returns a NoneType, no optimizer": lambda module: None,
    r"Hidden takes \*\*settings": lambda module: Hidden(module.parameters(), lr=0.1),
    "uses estimated_stepping_batches of the trainer": lambda module: module.trainer.estimated_stepping_batches,
}


@pytest.mark.parametrize("sentence", OPTIMIZERS)
def test_optimizers_that_would_train_differently_are_refused_by_name(sentence: str) -> None:
    module = Module()
    module.configure_optimizers = lambda: OPTIMIZERS[sentence](module)
    with pytest.raises(UsageError, match=sentence):
        fit_module(Config(), module, dataset=DATA)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Annealed, "uses global_step of the trainer"),
        (Silent, "must give the loss"),
        (Alternating, "a step uses batch_idx"),
        (lambda: Losses().eval(), "logs first_loss, second_loss: call the loss"),
    ],
)
def test_a_step_that_needs_the_trainer_or_gives_no_loss_or_several_is_refused(kind: Any, sentence: str) -> None:
    module = kind()
    with torch.set_grad_enabled(module.training), pytest.raises(UsageError, match=sentence):
        ModuleTask().loss(module, (torch.zeros(3, 4),))


def test_a_step_leaves_the_module_as_it_was() -> None:
    module = Module()
    before = dict(vars(module))
    sums = ModuleTask().loss(module, (torch.ones(3, 4),))
    assert vars(module) == before
    assert sums.count == 3
    share: Any = sums.metrics["share"]
    assert float(share.total / share.count) == 0.25


def test_the_optimizer_keeps_its_settings() -> None:
    module = Module()
    kind, settings, rate = _settings_of(module, _configured(module)[0])
    assert kind is torch.optim.AdamW
    assert rate == 0.1
    made = kind(nn.Linear(2, 2).parameters(), lr=0.5, **settings)
    assert made.param_groups[0]["betas"] == (0.8, 0.9)
    assert made.param_groups[0]["weight_decay"] == 0.3
    with_a_rate_of_its_own = torch.optim.SGD([{"params": list(module.parameters()), "lr": 0.01}], lr=0.1)
    assert _settings_of(module, with_a_rate_of_its_own)[2] == 0.01


SCHEDULERS: dict[str, Any] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 8),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [4],
    ),
    "cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=20, cycle_momentum=False),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("steps", [1, 4])
def test_rates_are_those_of_the_scheduler(name: str, steps: int) -> None:
    optimizer = torch.optim.SGD(nn.Linear(4, 1).parameters(), lr=0.2)
    scheduler = SCHEDULERS[name](optimizer)
    schedule = _Schedule(scheduler, optimizer, 0.2, steps)
    found = [0.2 * schedule(step, 20) for step in range(1, 17)]
    expected = []
    for step in range(1, 17):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step % steps == 0:
            scheduler.step()
    assert found == pytest.approx(expected)
    assert 0.2 * schedule(2, 20) == pytest.approx(expected[1]), "a resume asks for earlier steps"
