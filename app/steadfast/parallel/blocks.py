"""Repeated layers of a model, for sharding, checkpointing and compilation."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from steadfast.errors import UsageError


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers of a model, [] if none.

    These are the result of the model's method `blocks()`; else modules of the classes in Hugging Face's
    `_no_split_modules`; else the members of the largest ModuleList or Sequential of one class.
    """
    # Many models have a ModuleList of this name, which is callable too, because every module is.
    blocks = getattr(model, "blocks", None)
    if callable(blocks) and not isinstance(blocks, nn.Module):
        return list(blocks())
    found = _of_classes(model.modules(), getattr(model, "_no_split_modules", None) or ())
    return _apart(model, found or _largest_repetition(model))


def stop_caching(model: nn.Module) -> None:
    """Disable the cache of keys and values in a Hugging Face model.

    Training does not need the cache.
    """
    settings: Any = getattr(model, "config", None)
    if hasattr(settings, "use_cache"):
        settings.use_cache = False


def modules_of_classes(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Return the modules of the classes with these names, inner ones first.

    Raises:
        UsageError: the model has no module of one of the classes.
    """
    inside = _inner_first(model)
    inside.remove(model)
    classes = {type(module).__name__ for module in inside}
    for name in names:
        if name not in classes:
            known = ", ".join(sorted(classes))
            raise UsageError(f"parallel.wrap: the model has no module of a class {name}; it has {known}")
    return _of_classes(_unshared(model, inside), names)


def modules_of_size(model: nn.Module, num_parameters: int) -> list[nn.Module]:
    """Return modules with at least `num_parameters` of their own, inner ones first.

    Parameters of a returned module do not count for the modules around it.
    """
    found: list[nn.Module] = []
    taken: set[nn.Parameter] = set()
    for module in _unshared(model, _inner_first(model)):
        own = set(module.parameters()) - taken
        is_callable = type(module).forward is not nn.Module.forward
        if module is not model and is_callable and _num_elements(own) >= num_parameters:
            found.append(module)
            taken |= own
    return found


def _of_classes(modules: Iterable[nn.Module], names: Collection[str]) -> list[nn.Module]:
    return [module for module in modules if type(module).__name__ in names]


def _inner_first(model: nn.Module) -> list[nn.Module]:
    return list(model.modules())[::-1]


def _largest_repetition(model: nn.Module) -> list[nn.Module]:
    candidates: list[list[nn.Module]] = [[]]
    for module in model.modules():
        members = list(module.children())
        kinds = {type(member) for member in members}
        # A unit is gathered when its forward is called, so modules without a forward, such as lists, do not qualify.
        callable_ones = len(kinds) == 1 and kinds.pop().forward is not nn.Module.forward
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(members) > 1 and callable_ones:
            candidates.append(members)
    return max(candidates, key=_num_parameters)


def _num_parameters(modules: list[nn.Module]) -> int:
    return _num_elements(nn.ModuleList(modules).parameters())  # a list of modules counts a shared parameter once


def _num_elements(params: Iterable[nn.Parameter]) -> int:
    return sum(map(Tensor.numel, params))


def _apart(model: nn.Module, modules: list[nn.Module]) -> list[nn.Module]:
    """Remove nested modules, and modules that share parameters with the rest."""
    inner: set[nn.Module] = set()
    for module in modules:
        inner |= set(module.modules()) - {module}
    return [module for module in _unshared(model, modules) if module not in inner]


def _unshared(model: nn.Module, modules: list[nn.Module]) -> list[nn.Module]:
    """Remove modules that share a parameter with another part of the model."""
    # fully_shard puts a parameter into the group of the first module that has it. A module outside of that group would
    # use the parameter while it is not gathered.
    unshared: list[nn.Module] = []
    uses = _uses(model)
    for module in dict.fromkeys(modules):
        if all(uses[param] == number for param, number in _uses(module).items()):
            unshared.append(module)
    return unshared


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    """Return under how many names a module holds each of its parameters."""
    return Counter(param for _, param in module.named_parameters(remove_duplicate=False))
