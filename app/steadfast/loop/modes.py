"""Training and evaluation mode of the modules of a model."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def prepare_for_training(model: nn.Module) -> tuple[str, ...]:
    """Enter training mode if the whole model is in evaluation mode.

    Models from `from_pretrained` are in evaluation mode.

    Returns:
        the names of the outermost submodules that the user has put into evaluation mode, and that stay in it.
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
    """Put all modules into evaluation mode, and restore their modes afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
