"""Pipeline parallel: each stage of a replica holds some layers, and passes the hidden state on.

Every stage runs the task's own loss on its copy of the whole model. In the copy the layers of other stages do nothing,
and their parameters have no memory. So masks, positions and the like are computed on every stage, and only the hidden
state and the states of the random generators are sent.

The schedule is that of torch.distributed.pipelining's Schedule1F1B or ScheduleGPipe. Their classes are not used: they
send without a way to abort, and they need a fixed number of microbatches of one shape.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadfast.config import PipelineConfig
from steadfast.data.batches import Batch
from steadfast.errors import TrainingError, UsageError
from steadfast.parallel.buckets import GradientBuckets
from steadfast.parallel.dtensor import TENSOR_AXIS, squares_to_sum
from steadfast.parallel.precision import Precision
from steadfast.parallel.replicated import ReplicatedParallelism
from steadfast.parallel.stages import Outline, cut, get_generators, keep_only, outline_of, set_generators
from steadfast.tasks import Sums, Task
from steadfast.world.communicator import Communicator
from steadfast.world.groups import Groups, PeerLost
from steadfast.world.runtime import World

_FORMATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MOST_DIMS = 8
_HEADER = 2 + _MOST_DIMS  # numbers before the states of the generators: format, number of dimensions, and sizes


class _Left(BaseException):
    """The forward of a stage that is not the last has come to a layer of the next stage."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _Forward(NamedTuple):
    """A microbatch between its forward and its backward on this stage."""

    received: Tensor | None  # hidden state of the stage before; None on the first stage
    output: Tensor  # hidden state for the next stage, or the loss


class PipelineParallelism(ReplicatedParallelism):
    """Strategy of stages, each of which is summed over replicas.

    With `parallel.tensor_size` a stage has several ranks, which compute parts of its layers. Each sends its hidden
    state, which is the same on all of them, to the rank of the next stage with the same part.
    """

    def __init__(self, config: PipelineConfig, world: World, precision: Precision) -> None:
        super().__init__(config, world, precision)
        self._balance = config.balance
        self._plan = config.plan
        self.neighbours: Callable[[World], Neighbours] = Neighbours  # an estimate sends nothing
        self._neighbours: Neighbours
        self._across: Communicator  # the same stage of other replicas
        self._within: Communicator  # all ranks of this replica
        self._outline: Outline
        self._places: dict[str, int] = {}  # trained parameter of the whole model -> its index among them
        self._trained: list[tuple[nn.Parameter, int]] = []  # of this stage, with that index
        self._received: Tensor | None = None  # by the forward under way
        self._forward: _Forward | None = None  # the last one
        self._waiting: deque[_Forward] = deque()
        self._last = False
        self._more = False  # whether another microbatch of the step follows
        # A stage runs as many forwards ahead of the first backward as there are stages after it.
        self._most_waiting: float = world.stages - 1 - world.stage
        if config.schedule == "gpipe":
            self._most_waiting = math.inf

    def wrap(self, model: nn.Module) -> nn.Module:
        world, outline = self._world, outline_of(model)
        bounds = cut(len(outline.blocks), world.stages, self._balance)
        for name, param in model.named_parameters():
            if param.requires_grad:
                self._places[name] = len(self._places)
        keep_only(model, outline.stages(model, bounds)[world.stage], self._precision.device)
        if not any(param.requires_grad for param in model.parameters()):
            raise UsageError(f"parallel.stages={world.stages}: stage {world.stage} has no parameter that trains")
        self._outline = outline
        self._divert(model, *bounds[world.stage])
        (self._across,) = world.groups.add_axis(world.lines("replicate"))
        firsts = range(0, world.size, world.replica_size)
        (self._within,) = world.groups.add_axis(range(first, first + world.replica_size) for first in firsts)
        if world.tensor_size > 1:
            self._split(model)
        self._neighbours = self.neighbours(world)
        return model

    def _split(self, model: nn.Module) -> None:
        """Split this stage's layers of the plan over its tensor group. A collective."""
        # The imports take a second, and only split layers need them.
        from torch.distributed.device_mesh import DeviceMesh

        from steadfast.parallel.tensor import split_layers

        world = self._world
        (communicator,) = world.groups.add_axis(world.lines("tensor"))
        # DTensor caches results by a mesh's name, so each attempt has its own.
        name = f"attempt-{world.attempt}{TENSOR_AXIS}"
        device = self._precision.device.type
        split_layers(model, self._plan, DeviceMesh.from_group(communicator.group, device, mesh_dim_names=(name,)))

    def _begin(self, model: nn.Module) -> None:
        """Begin the first step, because only then the parameters have memory."""
        self.buckets = GradientBuckets.of(model)
        self.buckets.begin(self._across)
        for name, param in model.named_parameters():
            if param.requires_grad:
                self._trained.append((param, self._places[name]))

    def _divert(self, model: nn.Module, start: int, stop: int) -> None:
        """Replace the layers of other stages, and let this stage's layers begin with what it receives."""
        for number, name in enumerate(self._outline.blocks):
            block = model.get_submodule(name)
            if number < start:
                block.forward = partial(_pass_over, self._outline)
            elif number >= stop:
                block.forward = _leave
            elif start:
                block.register_forward_pre_hook(self._enter)

    def _enter(self, block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._received is not None:
            return None
        self._received = self._neighbours.receive_forward(args[0].device, self._more)
        if not torch.is_grad_enabled():
            return (self._received, *args[1:])
        # A copy, because a layer may change its argument in place, which a leaf of the graph does not allow.
        return (self._received.requires_grad_().clone(), *args[1:])

    def loss(self, task: Task, model: nn.Module, batch: Batch) -> Sums:
        """Run the forward of this stage; only the last stage has a loss.

        Raises:
            TrainingError: the forward did not run the layers of this stage.
        """
        self._received = None
        try:
            sums = task.loss(model, batch)
            output = sums.loss_sum
        except _Left as left:
            output = left.hidden
            sums = Sums(torch.zeros((), dtype=torch.float64, device=output.device), 0)
        if self._world.stage and self._received is None:
            raise TrainingError("parallel.kind=pipeline: a forward did not run the layers of this stage")
        if not self._world.in_last_stage:
            if output is sums.loss_sum:
                raise TrainingError("parallel.kind=pipeline: a forward did not run the layers of the next stage")
            self._neighbours.send_forward(output.detach(), self._more)
        self._forward = _Forward(self._received, output)
        return sums

    def backward(self, loss: Tensor) -> None:
        assert self._forward is not None
        if self._world.in_last_stage:
            self._forward = self._forward._replace(output=loss)
        self._waiting.append(self._forward)
        self._forward = None
        self._expect()
        if len(self._waiting) > self._most_waiting:
            self._run_backward()

    def _run_backward(self) -> None:
        """Run the backward of the oldest microbatch, and sum the gradients after the step's last one."""
        received, output = self._waiting.popleft()
        self.buckets.expect(self._last and not self._waiting)
        if self._world.in_last_stage:
            self._precision.backward(output)
        else:
            gradient = self._neighbours.receive_backward()
            self._expect()
            if output.requires_grad:
                output.backward(gradient)
        if received is not None:
            gradient = torch.zeros_like(received) if received.grad is None else received.grad
            self._neighbours.send_backward(gradient)
        # Not after an exception: the peers would take an incomplete gradient for a whole one.
        self.buckets.finish()

    def _expect(self) -> None:
        if self._waiting and not self._world.in_last_stage:
            self._neighbours.expect_backward(self._waiting[0].output)

    @contextmanager
    def synchronize(self, model: nn.Module, last: bool) -> Iterator[None]:
        if not self._trained:
            self._begin(model)
        self._last = last
        self._more = not last
        yield
        self._more = False
        if last:
            while self._waiting:
                self._run_backward()
            self._neighbours.wait()

    def train_also(self, trained: list[nn.Parameter]) -> bool:
        return False

    def store_gradients(self) -> None:
        self._across.wait()
        super().store_gradients()

    def whole_norms(self, norms: Tensor, gradients: list[Tensor]) -> Tensor:
        squares = norms.new_zeros(len(self._places))
        places = [place for param, place in self._trained if param.grad is not None]
        squares[places] = squares_to_sum(norms, gradients, self._world.tensor)
        self._within.sum(squares)
        self._within.wait()
        return squares.sqrt()

    def clear_gradients(self, optimizer: Optimizer) -> None:
        if self._trained:  # a step has begun
            super().clear_gradients(optimizer)


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def _pass_over(outline: Outline, hidden: Tensor, *args: Any, **named: Any) -> Any:
    """Return a layer's output of the right shapes, in place of its forward."""
    return outline.output(hidden)


def _leave(hidden: Tensor, *args: Any, **named: Any) -> Any:
    raise _Left(hidden)


class Neighbours:
    """Transfers from and to the stages before and after this one.

    Each pair of stages has one communicator for hidden states and one for their gradients, so that neither waits for
    the other. A transfer is a broadcast in the pair.
    """

    def __init__(self, world: World) -> None:
        self._groups: Groups = world.groups
        pairs: list[list[int]] = []
        for first in range(world.stages - 1):
            pairs += [line[first : first + 2] for line in world.lines("stage")]
        forward, backward = world.groups.add_axis(pairs), world.groups.add_axis(pairs)
        # Only the first stage has no pair with a stage before it.
        self._before = (forward[0], backward[0]) if world.stage else None
        self._after = None if world.in_last_stage else (forward[-1], backward[-1])
        # Receptions are started ahead of their use, so that a transfer takes place while both stages compute.
        self._ahead: tuple[Tensor, Tensor] | None = None  # header and hidden state, in memory as large as the last ones
        self._gradient: Tensor | None = None
        self._sent: Tensor | None = None  # last hidden state, without memory, if the next stage has started ahead

    def send_forward(self, hidden: Tensor, more: bool) -> None:
        """Start to send a hidden state, and the states of the generators, to the next stage.

        Args:
            more: whether another one follows in the same step.
        """
        assert self._after is not None
        sizes = [*hidden.shape, *[0] * (_MOST_DIMS - hidden.dim())]
        numbers = torch.tensor([_FORMATS.index(hidden.dtype), hidden.dim(), *sizes])
        header = torch.cat([numbers.view(torch.uint8), *get_generators(hidden.device)])
        self._wait(self._after[0])
        self._after[0].broadcast(header.to(hidden.device), 0)
        if self._sent is not None and not _alike(self._sent, hidden):
            # The next stage has started to receive another shape.
            self._after[0].broadcast(torch.zeros_like(self._sent, device=hidden.device), 0)
        self._after[0].broadcast(hidden.contiguous(), 0)
        self._sent = torch.empty_like(hidden, device="meta") if more else None

    def receive_forward(self, device: torch.device, more: bool) -> Tensor:
        """Return the next hidden state of the stage before, and set the generators as they are there.

        Args:
            more: as the stage before has sent it.
        """
        assert self._before is not None
        if self._ahead is None:
            header = torch.empty(8 * _HEADER + sum(map(len, get_generators(device))), dtype=torch.uint8, device=device)
            self._before[0].broadcast(header, 0)
        else:
            header, _ = self._ahead
        # After an abort the header may be garbage, and an abort is not told on the device.
        self._before[0].synchronize()
        self._check()
        found = header.cpu()
        number, dim, *sizes = found[: 8 * _HEADER].view(torch.int64).tolist()
        hidden = torch.empty(sizes[:dim], dtype=_FORMATS[number], device=device)
        if self._ahead is not None and _alike(self._ahead[1], hidden):
            _, hidden = self._ahead
        else:
            self._before[0].broadcast(hidden, 0)
            self._wait(self._before[0])
        self._ahead = None
        if more:
            self._ahead = torch.empty_like(header), torch.empty_like(hidden)
            for tensor in self._ahead:
                self._before[0].broadcast(tensor, 0)
        set_generators(device, found[8 * _HEADER :])
        return hidden

    def send_backward(self, gradient: Tensor) -> None:
        """Start to send the gradient of a received hidden state to the stage before."""
        assert self._before is not None
        self._wait(self._before[1])
        self._before[1].broadcast(gradient.contiguous(), 1)

    def expect_backward(self, output: Tensor) -> None:
        """Start to receive the gradient of a hidden state that was sent, unless that has begun."""
        assert self._after is not None
        if self._gradient is None:
            self._gradient = torch.empty_like(output, memory_format=torch.contiguous_format)
            self._after[1].broadcast(self._gradient, 1)

    def receive_backward(self) -> Tensor:
        """Return the gradient that is expected."""
        assert self._after is not None
        assert self._gradient is not None
        self._wait(self._after[1])
        gradient, self._gradient = self._gradient, None
        return gradient

    def wait(self) -> None:
        """Wait for everything that was sent."""
        for pair in (self._before, self._after):
            for communicator in pair or ():
                self._wait(communicator)

    def _wait(self, communicator: Communicator) -> None:
        communicator.wait()
        self._check()

    def _check(self) -> None:
        if self._groups.aborted.is_set():
            raise PeerLost("the world was aborted")
