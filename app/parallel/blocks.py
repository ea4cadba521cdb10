"""The repeated layers of a model, which are treated one at a time."""

from torch import nn


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the repeated parts of a model; none if there are none.

    They are what its method `blocks()` returns; else modules of the classes that Hugging Face's models name; else the
    largest ModuleList or Sequential of modules of one class.
    """
    blocks = getattr(model, "blocks", None)
    if callable(blocks) and not isinstance(blocks, nn.Module):
        return list(blocks())
    names = getattr(model, "_no_split_modules", None) or ()
    found = [module for module in model.modules() if type(module).__name__ in names]
    return _apart(model, found or _largest_repetition(model))


def _largest_repetition(model: nn.Module) -> list[nn.Module]:
    candidates: list[list[nn.Module]] = [[]]
    for module in model.modules():
        members = list(module.children())
        kinds = {type(member) for member in members}
        # A unit is gathered when its forward is called, so a list of lists is none.
        callable_ones = len(kinds) == 1 and kinds.pop().forward is not nn.Module.forward
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(members) > 1 and callable_ones:
            candidates.append(members)
    return max(candidates, key=_num_parameters)


def _num_parameters(modules: list[nn.Module]) -> int:
    return sum(param.numel() for param in nn.ModuleList(modules).parameters())


def _apart(model: nn.Module, modules: list[nn.Module]) -> list[nn.Module]:
    """Leave out modules within others, and those that share a parameter with another part of the model."""
    names: dict[nn.Parameter, int] = {}
    for _, param in model.named_parameters(remove_duplicate=False):
        names[param] = names.get(param, 0) + 1
    inner: set[nn.Module] = set()
    for module in modules:
        inner |= set(module.modules()) - {module}
    apart = []
    for module in dict.fromkeys(modules):
        is_shared = any(names[param] > 1 for param in module.parameters())
        if module not in inner and not is_shared:
            apart.append(module)
    return apart
