"""Training and evaluation mode of a model's modules, each of which has its own."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def prepare_for_training(model: nn.Module) -> tuple[str, ...]:
    """Enter training mode if the whole model came in evaluation mode, as from `from_pretrained`.

    Returns:
        the names of the outermost submodules that stay in evaluation mode, because the user has put them there.
    """
    if not any(module.training for module in model.modules()):
        model.train()
    frozen: list[str] = []
    for name, module in model.named_modules():
        if not name:
            continue
        if not module.training and not any(name.startswith(f"{outer}.") for outer in frozen):
            frozen.append(name)
    return tuple(frozen)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Have all modules in evaluation mode within, and each in its own mode again afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
