"""Tensor parallel: the workers of a tensor group compute parts of the same linear layers.

A layer of kind `column` is split by its outputs, and one of kind `row` by its inputs. Between both, a worker has some
of the features (heads of an attention, or hidden units of an MLP), and computes with these features as if there were no
others. After the row the results of all workers are summed. One forward of the whole model on a few samples, and one
for each part, show whether the model's own code allows this; any other model is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from steadfast.errors import UsageError
from steadfast.parallel.stages import (
    following,
    get_generators,
    reached,
    set_generators,
    states_of_generators,
    versions_of_buffers,
)
from steadfast.tasks import Sums

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_KEY = "parallel.tensor_size"
_STYLES = {"colwise": "column", "rowwise": "row", "column": "column", "row": "row"}
# Styles of Hugging Face for layers that may as well stay whole, because their results are whole.
_WHOLE = ("colwise_rep", "colwise_gather_output", "embedding_rowwise", "replicate")
_TOLERANCE = 1e-5  # relative difference that rounding in fp32 explains


def split_layers(model: nn.Module, plan: Mapping[str, str] | None, mesh: DeviceMesh) -> None:
    """Split the layers of a plan over the ranks of a mesh, unless another stage holds them."""
    # The import takes a second.
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles: dict[str, Any] = {}
    for name, style in layers_of_plan(model, plan, mesh.size()).items():
        if list(model.get_submodule(name).parameters()):
            styles[name] = ColwiseParallel() if style == "column" else RowwiseParallel()
    # Without a source every rank takes its part of its own values, and nothing is sent.
    parallelize_module(model, mesh, styles, src_data_rank=None)


def layers_of_plan(model: nn.Module, plan: Mapping[str, str] | None, size: int) -> dict[str, str]:
    """Return the kind, column or row, of each layer that is split into `size` parts.

    Args:
        plan: kinds by pattern, None for the model's own plan.

    Raises:
        UsageError: the plan does not fit the model.
    """
    key = "parallel.plan" if plan is not None else "the model's own plan"
    patterns = _own_plan(model) if plan is None else dict(plan)
    modules = dict(model.named_modules())
    found: dict[str, str] = {}
    for pattern, kind in patterns.items():
        names = [name for name in modules if fnmatchcase(name, pattern)]
        if not names:
            raise UsageError(f"{key}: {pattern} matches no module of the model; it has {_some(modules)}")
        for name in names:
            if found.setdefault(name, kind) != kind:
                raise UsageError(f"{key}: {name} is matched as column and as row")
            _check_layer(key, name, modules[name], kind, size)
    if not {"column", "row"} <= set(found.values()):
        raise UsageError(f"{key}: needs layers of both kinds, column and row, which follow each other")
    _refuse_shared(model, key, found)
    return found


def _own_plan(model: nn.Module) -> dict[str, str]:
    if callable(own := getattr(model, "tensor_plan", None)):
        return dict(own())
    given = getattr(model, "_tp_plan", None)
    if not isinstance(given, Mapping) or not given:
        raise UsageError(f"{_KEY}: the model has no plan of its own. Give parallel.plan, as {{'*.up': column}}")
    found: dict[str, str] = {}
    for pattern, style in given.items():
        if style in _WHOLE:
            continue
        if style not in _STYLES:
            raise UsageError(f"{_KEY}: the model's own plan has {style} for {pattern}. Give parallel.plan")
        found[pattern] = _STYLES[style]
    return found


def _some(modules: Mapping[str, nn.Module]) -> str:
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    return ", ".join(linear[:6]) + (", ..." if len(linear) > 6 else "")


def _check_layer(key: str, name: str, module: nn.Module, kind: str, size: int) -> None:
    if not isinstance(module, nn.Linear):
        raise UsageError(f"{key}: {name} is a {type(module).__name__}, and only nn.Linear can be split")
    num, what = (module.out_features, "outputs") if kind == "column" else (module.in_features, "inputs")
    if num % size:
        raise UsageError(f"{key}: {name} has {num} {what}, which {_KEY}={size} does not divide")


def _refuse_shared(model: nn.Module, key: str, layers: Mapping[str, str]) -> None:
    """Raise UsageError for a layer whose parameters belong to another layer as well."""
    holders: dict[Tensor, str] = {}
    for full_name, param in model.named_parameters(remove_duplicate=False):
        module = full_name.rpartition(".")[0]
        other = holders.setdefault(param, module)
        if other != module and {other, module} & set(layers):
            split, whole = (module, other) if module in layers else (other, module)
            raise UsageError(f"{key}: {split} shares its weights with {whole}, as tied weights do; leave it whole")


def examine_split(
    model: nn.Module, layers: Mapping[str, str], size: int, run: Callable[[], Sums], device: torch.device
) -> None:
    """Check by some forwards of the whole model that parts of its layers compute what the whole layers do.

    Args:
        layers: kinds by name, as from `layers_of_plan`.
        run: computes the task's loss of a few samples with the model, in training mode.

    Raises:
        UsageError: `size` parts would compute something else than the whole model.
    """
    drawn = get_generators(device)
    probe = _Probe(model, layers, size, device)
    probe.follow_whole(run)
    for part in range(size):
        set_generators(device, torch.cat(drawn))
        probe.follow_part(part, run)


class _Probe:
    """Follows forwards through columns and rows, whose results it replaces.

    The result of a column is replaced by random numbers, because the weights of the model may be zeros. In a forward of
    a part they are the same numbers, cut to the part, and each row must receive what it received in the whole forward,
    cut likewise.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, str], size: int, device: torch.device) -> None:
        self._model = model
        self._layers = layers
        self._size = size
        self._device = device
        self._part: int | None = None  # None in the forward of the whole model
        self._numbers = torch.Generator(device).manual_seed(0)
        self._results: dict[str, list[Tensor]] = {}  # of columns and rows, call by call
        self._inputs: dict[str, list[Tensor]] = {}  # of rows
        self._calls: dict[str, int] = {}
        self._open: dict[Tensor, str] = {}  # results of columns, which only rows may use
        self._used: set[Tensor] = set()  # of these, by a row
        self._drawn: list[Any] | None = None  # states of the generators after the last column

    def follow_whole(self, run: Callable[[], Sums]) -> None:
        """Run a forward of the whole model, and remember what columns and rows have computed."""
        before = versions_of_buffers(self._model)
        with self._following():
            loss = run().loss_sum
        for name, version in versions_of_buffers(self._model).items():
            if version != before[name]:
                self._refuse(f"a forward changes its buffer {name}, as BatchNorm does; take parallel.kind=ddp")
        for name in self._layers:
            if name not in self._calls:
                self._refuse(f"a forward does not run its layer {name}")
        for result in reached(loss) & self._open.keys():
            self._refuse(f"the results of its column {self._open[result]} are used beyond a row")
        for result in self._open.keys() - self._used:
            self._refuse(f"no row takes the results of its column {self._open[result]}")

    def follow_part(self, part: int, run: Callable[[], Sums]) -> None:
        """Run a forward with a part of the features."""
        self._part = part
        self._calls = {}
        with self._following():
            try:
                run()
            except UsageError:
                raise
            except Exception as error:
                what = " ".join(str(error).split())[:200]
                self._refuse(
                    f"its code does not work with 1/{self._size} of the features, as with a number of heads that is no "
                    f"multiple of {_KEY} ({type(error).__name__}: {what})"
                )

    def _following(self) -> AbstractContextManager[None]:
        hooks: list[RemovableHandle] = []
        for name, kind in self._layers.items():
            module = self._model.get_submodule(name)
            enter, leave = self._enter_row, self._leave_row
            if kind == "column":
                enter, leave = self._enter_column, self._leave_column
            hooks.append(module.register_forward_pre_hook(partial(enter, name)))
            hooks.append(module.register_forward_hook(partial(leave, name)))
        # A frozen parameter must not be used between column and row either.
        return following(list(self._model.parameters()), hooks)

    def _enter_column(self, name: str, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self._part is None:
            for result in reached(args[0]) & self._open.keys():
                self._refuse(f"the results of its column {self._open[result]} are used beyond a row, by {name}")
        return args

    def _leave_column(self, name: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        call = self._count(name)
        if self._part is not None:
            return self._cut(self._results[name][call])
        result = torch.randn(output.shape, dtype=output.dtype, device=output.device, generator=self._numbers)
        result.requires_grad_()
        self._results.setdefault(name, []).append(result)
        self._open[result] = name
        self._drawn = states_of_generators(self._device)
        return result.clone()

    def _enter_row(self, name: str, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        call = self._calls.get(name, 0)
        if self._part is None:
            self._check_row(name, args[0])
            self._inputs.setdefault(name, []).append(args[0].detach())
            return args
        whole = self._inputs[name][call]
        found, expected = args[0].detach(), self._cut(whole)
        if found.shape != expected.shape or not _alike(found, expected):
            self._refuse(
                f"between a column and its row {name} each feature's result depends on features of other parts, or "
                "on its number among all"
            )
        return (whole, *args[1:])

    def _leave_row(self, name: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        call = self._count(name)
        if self._part is None:
            self._results.setdefault(name, []).append(output.detach())
        # What follows is the same in every forward. Its graph begins anew, without the columns before it.
        result: Tensor = self._results[name][call]
        return result.clone().requires_grad_()

    def _check_row(self, name: str, given: Tensor) -> None:
        used = reached(given)
        columns = used & self._open.keys()
        if not columns:
            self._refuse(f"its row {name} takes no results of a column")
        self._used |= columns
        of_model = {param: known for known, param in self._model.named_parameters()}
        for other in used - columns:
            what = of_model.get(other, "a tensor")  # type: ignore[call-overload]
            self._refuse(
                f"{what} is used between a column and its row {name}, and each worker would know a part of its "
                "gradient only"
            )
        if self._drawn != states_of_generators(self._device):
            self._refuse(
                f"random numbers are drawn between a column and its row {name}, as by dropout. Each worker would draw "
                "other numbers than one process; set that dropout to 0"
            )

    def _count(self, name: str) -> int:
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        return call

    def _cut(self, whole: Tensor) -> Tensor:
        assert self._part is not None
        return whole.detach().chunk(self._size, -1)[self._part].clone().requires_grad_()

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(f"{_KEY}: the model cannot be split: {what}")


def _alike(found: Tensor, expected: Tensor) -> bool:
    tolerance = _TOLERANCE
    if found.dtype in (torch.bfloat16, torch.float16):
        tolerance = 2e-2
    limit = tolerance * float(expected.detach().abs().max())
    return bool(((found - expected).abs() <= limit).all())
