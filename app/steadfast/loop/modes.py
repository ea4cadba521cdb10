"""Training and evaluation mode of the modules of a model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn


def prepare_for_training(model: nn.Module) -> tuple[str, ...]:
    """Enter training mode, as a plain loop does before its first step.

    Submodules that the user has put into evaluation mode stay in it, unless the whole model is in evaluation mode, as
    models from `from_pretrained` are.

    Returns:
        the names of the outermost submodules that are in evaluation mode now.
    """
    modes = {module: module.training for module in model.modules()}
    _enter_training(model, modes if any(modes.values()) else {})
    frozen: list[str] = []
    for name, module in model.named_modules():
        if not name:
            continue
        if not module.training and not any(name.startswith(f"{outer}.") for outer in frozen):
            frozen.append(name)
    return tuple(frozen)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put all modules into evaluation mode, and go back to training afterwards as before."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        _enter_training(model, modes)


def _enter_training(model: nn.Module, modes: Mapping[nn.Module, bool]) -> None:
    """Call `train()`, and then `eval()` of the modules that were in evaluation mode."""
    # The flags are not set by hand, because modules may do more in these methods: LoRA merges and splits its weights,
    # and a model may keep its BatchNorm in evaluation mode.
    model.train()
    for module, trained in modes.items():  # outer modules come first
        if not trained and module.training:
            module.eval()
            for inner in module.modules():
                if modes.get(inner, False) and not inner.training:
                    inner.train()
