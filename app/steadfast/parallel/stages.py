"""Outline of a model for a pipeline: its layers in order, and the parameters around them.

A stage of a pipeline keeps some of the repeated layers (`blocks_of`). Only the hidden state, the first argument of each
layer, passes from stage to stage. One forward of the whole model on a few samples shows whether this suffices; a model
for which it does not is refused.
"""

import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from steadfast.errors import UsageError
from steadfast.parallel.blocks import blocks_of
from steadfast.plan import even_shares
from steadfast.tasks import Sums

_KEY = "parallel.kind=pipeline"


@dataclass(frozen=True)
class Outline:
    """Layers and parameters of a model by name, the same for every copy of the model."""

    blocks: tuple[str, ...]  # repeated layers, in the order of a forward
    before: tuple[str, ...]  # parameters that are used before the first layer
    after: tuple[str, ...]  # parameters that are used after the last layer
    outputs: tuple[Any, ...]  # leaves of a layer's output, without the hidden state
    structure: pytree.TreeSpec  # of a layer's output
    place: int  # of the hidden state among the leaves
    hidden: Tensor  # hidden state of the samples that were tried, without memory

    def output(self, hidden: Tensor) -> Any:
        """Return a layer's output with this hidden state."""
        return pytree.tree_unflatten([*self.outputs[: self.place], hidden, *self.outputs[self.place :]], self.structure)

    def stages(self, model: nn.Module, bounds: Sequence[tuple[int, int]]) -> list[set[nn.Parameter]]:
        """Return the parameters of each stage, which has the layers [start, stop) of its bounds."""
        held: list[set[nn.Parameter]] = []
        for start, stop in bounds:
            held.append(set())
            for name in self.blocks[start:stop]:
                held[-1].update(model.get_submodule(name).parameters())
        held[0].update(map(model.get_parameter, self.before))
        held[-1].update(map(model.get_parameter, self.after))
        return held


_outlines: weakref.WeakKeyDictionary[nn.Module, Outline] = weakref.WeakKeyDictionary()
_elsewhere: weakref.WeakKeyDictionary[nn.Module, dict[str, nn.Parameter]] = weakref.WeakKeyDictionary()


def set_outline(model: nn.Module, outline: Outline) -> None:
    """Record the outline of a copy of a model, for `outline_of`."""
    _outlines[model] = outline


def outline_of(model: nn.Module) -> Outline:
    """Return the outline that was set for a model."""
    return _outlines[model]


def held_elsewhere(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that other stages hold, without memory, under all of their names."""
    return _elsewhere.get(model, {})


def keep_only(model: nn.Module, held: set[nn.Parameter], device: torch.device) -> None:
    """Remove all other parameters from a model, and leave constants without memory in their places.

    The constants are NaN, so that a use of them in a loss cannot stay unnoticed.
    """
    removed: dict[str, nn.Parameter] = {}
    for name, param in list(model.named_parameters(remove_duplicate=False)):
        if param in held:
            continue
        module, _, last = name.rpartition(".")
        owner = model.get_submodule(module)
        del owner._parameters[last]
        setattr(owner, last, torch.full((), torch.nan, dtype=param.dtype, device=device).expand(param.shape))
        removed[name] = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
    _elsewhere[model] = removed


def lend_memory(model: nn.Module, device: torch.device) -> None:
    """Put zeros in the places of a model's tensors, for `examine`. The zeros of parameters have no memory."""
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                zeros = torch.zeros((), dtype=param.dtype, device=device).expand(param.shape)
                module._parameters[name] = nn.Parameter(zeros, requires_grad=param.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros_like(buffer, device=device)


def cut(num_blocks: int, stages: int, balance: Sequence[int] | None) -> list[tuple[int, int]]:
    """Return the layers [start, stop) of each stage.

    Raises:
        UsageError: there are not as many layers, or fewer than stages.
    """
    if num_blocks < stages:
        raise UsageError(f"parallel.stages={stages}: the model has only {num_blocks} repeated layers")
    balance = balance or even_shares(num_blocks, stages)
    if sum(balance) != num_blocks:
        raise UsageError(f"parallel.balance={list(balance)}: its sum must be the model's {num_blocks} repeated layers")
    return list(pairwise([0, *accumulate(balance)]))


def examine(model: nn.Module, run: Callable[[], Sums], device: torch.device) -> Outline:
    """Return the outline of a whole model by one forward.

    Args:
        run: computes the task's loss of a few samples with the model.
        device: device of the computation.

    Raises:
        UsageError: the stages of a pipeline would compute something else than the whole model.
    """
    return _Probe(model, device).outline(run)


class _Probe:
    """Follows a forward from layer to layer, by the graph of autograd, which is cut before and after each layer."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._names = {module: name for name, module in model.named_modules()}
        self._params: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
        self._blocks = blocks_of(model)
        if not self._blocks:
            self._refuse("no repeated layers are found; give the model a method blocks()")
        self._called: list[str] = []
        self._before: set[Tensor] = set()
        self._cuts: set[Tensor] = set()
        self._input: Tensor
        self._output: Tensor | None = None  # of the last layer
        self._drawn: list[Any] = []  # states of the generators after the last layer
        self._outputs: list[Any] = []
        self._structure: pytree.TreeSpec
        self._place = 0

    def outline(self, run: Callable[[], Sums]) -> Outline:
        """Run a forward, and describe it."""
        before = versions_of_buffers(self._model)
        with self._following():
            after = reached(run().loss_sum)
        for name, version in versions_of_buffers(self._model).items():
            if version != before[name]:
                self._refuse(
                    f"a forward changes its buffer {name}, as BatchNorm does; a stage would change its own only"
                )
        if self._output not in after:
            self._refuse("the loss does not depend on the output of the last layer")
        after.discard(self._output)
        if after & self._cuts:
            self._refuse("the loss also uses the input or output of a layer other than the last one's output")
        of_blocks = {param for block in self._blocks for param in block.parameters()}
        for what, found in (("before the first", self._before), ("after the last", after)):
            for name in self._names_of(found & of_blocks):
                self._refuse(f"its parameter {name} belongs to a layer and is also used {what} layer")
        for name in self._names_of(self._before & after):
            self._refuse(
                f"its parameter {name} is used before the first and after the last layer, as tied "
                "weights are, and no stage has both. Untie them (tie_word_embeddings=False)"
            )
        for name in self._names_of(self._params.keys() - of_blocks - self._before - after):
            self._refuse(f"its parameter {name} is used by no layer and not around them, so no stage has it")
        return Outline(
            tuple(self._called),
            tuple(self._names_of(self._before)),
            tuple(self._names_of(after)),
            tuple(self._outputs),
            self._structure,
            self._place,
            torch.empty_like(self._input, device="meta"),
        )

    def _names_of(self, found: AbstractSet[Tensor]) -> list[str]:
        """Return the names of parameters in the model's order."""
        return [name for param, name in self._params.items() if param in found]

    @contextmanager
    def _following(self) -> Iterator[None]:
        hooks: list[RemovableHandle] = []
        for block in self._blocks:
            hooks.append(block.register_forward_pre_hook(self._enter, with_kwargs=True))
            hooks.append(block.register_forward_hook(self._leave))
        with following(list(self._params), hooks):  # the place of a frozen parameter is wanted too
            yield
        if len(self._called) != len(self._blocks):
            missing = {self._names[block] for block in self._blocks} - set(self._called)
            self._refuse(f"a forward does not run its layer {min(missing)}")

    def _enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = self._names[block]
        if name in self._called:
            self._refuse(f"its layer {name} runs twice in a loss, as with two calls of the model")
        self._called.append(name)
        if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            self._refuse(
                f"the first argument of its layer {name} is no hidden state, a tensor of floating point numbers"
            )
        for other in pytree.tree_leaves((args[1:], kwargs)):
            if isinstance(other, Tensor) and other.requires_grad:
                self._refuse(f"its layer {name} takes a second argument that depends on trained parameters")
        used = reached(args[0])
        if self._output is None:
            self._before = used
        elif used != {self._output}:
            self._refuse(f"the input of its layer {name} is not computed from the output of the layer before it alone")
        elif self._drawn != states_of_generators(self._device):
            self._refuse(f"random numbers are drawn between its layers, before {name}")
        self._input = args[0].detach().requires_grad_()
        self._cuts.add(self._input)
        self._drawn = states_of_generators(self._device)
        # A copy, because a layer may change its argument in place, which a leaf of the graph does not allow.
        return (self._input.clone(), *args[1:]), kwargs

    def _leave(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        name = self._names[block]
        leaves, structure = pytree.tree_flatten(output)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if len(places) != 1 or leaves[places[0]].shape != self._input.shape:
            self._refuse(f"its layer {name} returns something else than one tensor of the shape of its first argument")
        self._place, self._structure = places[0], structure
        hidden = leaves.pop(self._place)
        self._outputs = leaves
        for param in reached(hidden) - {self._input} - {*block.parameters()}:
            self._refuse(f"its layer {name} uses {self._params.get(param, 'a tensor')} of another part of the model")
        if states_of_generators(self._device)[1:] != self._drawn[1:]:
            self._refuse(f"its layer {name} draws numbers from the generators of Python or numpy; take torch's")
        self._drawn = states_of_generators(self._device)
        self._output = hidden.detach().requires_grad_()
        self._cuts.add(self._output)
        return pytree.tree_unflatten([*leaves[: self._place], self._output.clone(), *leaves[self._place :]], structure)

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(f"{_KEY}: the model cannot be cut into stages: {what}")


@contextmanager
def following(params: Sequence[Tensor], hooks: Sequence[RemovableHandle]) -> Iterator[None]:
    """Let all parameters require gradients within the context, and remove the hooks at its end."""
    trains = [param.requires_grad for param in params]
    for param in params:
        param.requires_grad_(True)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for param, train in zip(params, trains, strict=True):
            param.requires_grad_(train)


def get_generators(device: torch.device) -> list[Tensor]:
    """Return the states of torch's generators for a device, uint8 on the host."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def states_of_generators(device: torch.device) -> list[Any]:
    """Return the states of all generators, comparable, those of torch in the first item."""
    states = [state.tolist() for state in get_generators(device)]
    return [states, random.getstate(), str(np.random.get_state())]


def set_generators(device: torch.device, state: Tensor) -> None:
    """Set torch's generators to joined states of `get_generators`."""
    # A copy of each, because torch reads a state from the beginning of its storage.
    own, *others = map(torch.clone, state.split(list(map(len, get_generators(device)))))
    torch.set_rng_state(own)
    for other in others:
        torch.cuda.set_rng_state(other, device)


def versions_of_buffers(model: nn.Module) -> dict[str, tuple[Tensor, int]]:
    """Return the buffers of a model's state with their versions, by name."""
    state = model.state_dict()
    return {name: (buffer, buffer._version) for name, buffer in model.named_buffers() if name in state}


def reached(tensor: Tensor) -> set[Tensor]:
    """Return the leaves with gradients on which a tensor depends."""
    if tensor.grad_fn is None:
        return {tensor} if tensor.requires_grad else set()
    found: set[Tensor] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(node.variable)
        waiting += [following for following, _ in node.next_functions if following is not None]
    return found
