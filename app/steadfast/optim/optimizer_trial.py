"""Trial of a user's optimizer before a run.

The optimizer must train and resume as in a plain loop.
"""

from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from steadfast.checkpoint.state import ModelState, NamedOptimizer, State, app_state, copy_state, flatten
from steadfast.config import TargetOptimizer
from steadfast.data.randomness import own_randomness
from steadfast.errors import ConfigError
from steadfast.optim.own_optimizer import build_own, build_plain, parameters_of, refusal

_NUM_STEPS = 9
_NUM_BEFORE_RESUME = 4
_SHAPE = (4, 3)  # of a tiny parameter; further dimensions have size 2
_ENDS = 16  # number of parameters that are tried from each end of a long list


class _Use(NamedTuple):
    """First steps of a parameter with any gradient and with a non-zero one."""

    first: int
    first_nonzero: int


# Used from the start; zero gradients until after the resume; used late; first used after the resume.
_USES = (_Use(1, 1), _Use(1, 5), _Use(2, 2), _Use(5, 5))


def try_optimizer(
    config: TargetOptimizer, model: nn.Module, device: torch.device, dtype: torch.dtype, sharded: bool
) -> None:
    """Raise ConfigError unless the optimizer trains and resumes as usual.

    The optimizer runs on tiny copies of the model's parameters, in float64 on the CPU, or as `dtype` on `device` if
    float64 on the CPU fails.

    Args:
        sharded: whether each worker will update only its part of every parameter.
    """
    trained = _some_of([param for param in model.parameters() if param.requires_grad])
    try:
        reason = _reason_to_refuse(config, trained, torch.device("cpu"), torch.float64, sharded)
    except ConfigError:
        raise
    except Exception:
        try:
            reason = _reason_to_refuse(config, trained, device, dtype, sharded)
        except Exception as error:
            raise refusal(config, _why_it_fails(error)) from error
    if reason:
        raise refusal(config, reason)


def _some_of(params: list[nn.Parameter]) -> list[nn.Parameter]:
    """Return all parameters of a small model, or some of each dimensionality."""
    if len(params) <= 2 * _ENDS:
        return params
    # Optimizers treat parameters by their number of dimensions, as Muon and Adafactor do. Reversed, the first parameter
    # of each number is the one that stays in the dictionary.
    first_of = {param.dim(): param for param in reversed(params[_ENDS:-_ENDS])}
    return [*params[:_ENDS], *first_of.values(), *params[-_ENDS:]]


def _reason_to_refuse(
    config: TargetOptimizer, trained: Sequence[nn.Parameter], device: torch.device, dtype: torch.dtype, sharded: bool
) -> str:
    """Return how training would differ here from a plain loop, or ""."""
    for shift in range(len(_USES)):
        trial = _Trial(config, trained, device, dtype, shift)
        if not trial.is_possible:
            continue
        plain, resumed = trial.plain(), trial.resumed()
        name = type(plain.optimizer).__name__
        not_resumed = f"{name} cannot continue from a checkpoint, which holds only tensors in an optimizer's state:"
        if not _equal(plain.state, trial.plain(seed=1).state):
            return f"{name} draws random numbers in its steps, and each worker would draw different ones"
        if kept := _kept_elsewhere(plain.optimizer, resumed.optimizer):
            return f"{not_resumed} it also keeps {kept}"
        if not _equal(plain.state, resumed.state):
            return f"{not_resumed} its updates depend on more than these"
        if sharded and not trial.same_rows(plain, trial.plain(num_rows=2)):
            return f"{name} needs whole tensors for its updates, and under fsdp a worker has a part of each; take ddp"
    return ""


class _CannotStep(Exception):
    """Failure of an optimizer step: the message is the optimizer's class."""


def _why_it_fails(error: Exception) -> str:
    """Return why an optimizer cannot be tried, in one line."""
    if not isinstance(error, _CannotStep):
        return f"fails on small parameters: {_in_one_line(error)}"
    name, cause = str(error), error.__cause__
    if "closure" in str(cause).lower():
        return (
            f"{name} needs a closure, that is several forwards in a step; a step here has one. Take another optimizer"
        )
    if "does not support dense gradients" in str(cause):
        return f"{name} needs sparse gradients, and gradients here are dense. Take torch.optim:Adam"
    return f"{name} fails in a step on small parameters: {_in_one_line(cause)}"


def _in_one_line(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


class _Ran(NamedTuple):
    """Parameters, their optimizer, and live references to their state."""

    params: nn.ParameterList
    optimizer: torch.optim.Optimizer
    state: State


class _Trial:
    """A few warm-up steps on tiny parameters, always with the same gradients.

    Args:
        shift: offset that assigns the entries of `_USES` to the parameters.
    """

    def __init__(
        self,
        config: TargetOptimizer,
        trained: Sequence[nn.Parameter],
        device: torch.device,
        dtype: torch.dtype,
        shift: int,
    ) -> None:
        self._config, self._trained, self._device, self._dtype = config, trained, device, dtype
        self._uses = list(islice(cycle(_USES), shift, shift + len(trained)))

    @property
    def is_possible(self) -> bool:
        """Return whether the first step has any gradient, as real steps do."""
        return any(use.first == 1 for use in self._uses)

    def plain(self, seed: int = 0, num_rows: int | None = None) -> _Ran:
        """Run the steps in a plain loop.

        Args:
            num_rows: number of first rows of each parameter to use; all by default.
        """
        with own_randomness(seed):
            params = self._params(num_rows)
            optimizer = build_plain(self._config, params)
            for step in range(1, _NUM_STEPS + 1):
                self._step(step, params, optimizer)
            return _Ran(params, optimizer, _state_of(params, optimizer))

    def resumed(self) -> _Ran:
        """Run the steps with an early state and a resume, as workers do."""
        with own_randomness(0):
            first = self._begun()
            copy_state({"model": ModelState(self._params(), False).state_dict()}, first.state)
            for step in range(1, _NUM_BEFORE_RESUME + 1):
                self._step(step, first.params, first.optimizer)
            second = self._begun()
            copy_state(first.state, second.state)
            for step in range(_NUM_BEFORE_RESUME + 1, _NUM_STEPS + 1):
                self._step(step, second.params, second.optimizer)
            return second

    def _begun(self) -> _Ran:
        params = self._params()
        with torch.no_grad():
            for param in params:
                param.zero_()  # a worker reads the weights after it has built the optimizer
        optimizer = build_own(self._config, params)
        return _Ran(params, optimizer, _state_of(params, optimizer))

    def _params(self, num_rows: int | None = None) -> nn.ParameterList:
        params = nn.ParameterList()
        for index, real in enumerate(self._trained):
            values = self._numbers(index, 0)
            if num_rows is not None and values.dim():
                values = values[:num_rows]
            param = nn.Parameter(values)
            vars(param).update(vars(real))  # users set attributes on parameters for their optimizer
            params.append(param)
        return params

    def _step(self, step: int, params: nn.ParameterList, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * step / _NUM_STEPS
        for index, (param, use) in enumerate(zip(params, self._uses, strict=True)):
            if step < use.first:
                param.grad = None
                continue
            param.grad = _rows_like(self._numbers(index, step), param)
            if step < use.first_nonzero:
                param.grad.zero_()
        try:
            optimizer.step()
        except Exception as error:
            raise _CannotStep(type(optimizer).__name__) from error

    def _numbers(self, index: int, step: int) -> Tensor:
        """Return a parameter's initial values (step 0) or gradient of a step."""
        num_dims = self._trained[index].dim()
        shape = (*_SHAPE, *[2] * (num_dims - len(_SHAPE)))[:num_dims]
        # Drawn in float64 on the CPU, so that a trial on a device in another format sees the same numbers.
        generator = torch.Generator().manual_seed(step * len(self._trained) + index)
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(self._device, self._dtype)

    def same_rows(self, whole: _Ran, part: _Ran) -> bool:
        """Return whether rows are updated in the same way without other rows.

        Under FSDP a worker updates only its own rows of each parameter.

        Args:
            whole: a run with all rows of each parameter.
            part: a run with the first rows of each parameter.
        """
        for index, (one, other) in enumerate(zip(whole.params, part.params, strict=True)):
            expected = _rows_like(one, other)
            moved = (expected - _rows_like(self._numbers(index, 0), other)).abs().max()
            # Sums over other shapes round differently. `not ... <=` also refuses numbers that are not finite.
            if not bool((expected - other).abs().max() <= 1e-3 * moved):
                return False
        return True


def _rows_like(values: Tensor, param: Tensor) -> Tensor:
    """Return as many first rows as a parameter has; a scalar has no rows."""
    return values[: len(param)] if param.dim() else values


def _state_of(params: nn.ParameterList, optimizer: torch.optim.Optimizer) -> State:
    return app_state({"model": ModelState(params, False), "optimizer": NamedOptimizer(params, optimizer)})


def _equal(one: State, other: State) -> bool:
    """Return whether a state contains all of the first one, bit by bit."""
    expected, found = flatten(one), flatten(other)
    if not expected.keys() <= found.keys():
        return False
    return all(torch.allclose(value, found[name], rtol=0, atol=0, equal_nan=True) for name, value in expected.items())


def _kept_elsewhere(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> str:
    """Return the names of differing numbers that no checkpoint holds."""
    first, second = _numbers_elsewhere(one), _numbers_elsewhere(other)
    differing: set[str] = set()
    for place, value in first.items():
        if second.get(place) != value:
            differing.add(place[1])
    return ", ".join(sorted(differing))


def _numbers_elsewhere(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], float]:
    """Return the numbers of an optimizer outside the tensors of its state."""
    holders: list[tuple[str, Mapping[str, Any]]] = [("as an attribute", vars(optimizer))]
    for group in optimizer.param_groups:
        holders.append(("in param_groups", group))
    for param in parameters_of(optimizer.param_groups):
        holders.append(("in its state, as a number", _without_tensors(optimizer.state[param])))
    numbers: dict[tuple[int, str], float] = {}
    for index, (place, holder) in enumerate(holders):
        for key, value in holder.items():
            if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
                numbers[index, f"{key} {place}"] = float(value)
    return numbers


def _without_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if not isinstance(value, Tensor)}
