"""Models built without memory, whose initial values are computed later.

During construction the operations that fill tensors are recorded instead of executed. `InitialValues.fill` then
executes them in the same order with the same random numbers. So the values equal those of a model that is built at
once, while memory holds only one tensor and its inputs at a time. The method is that of torchdistX's deferred_init, a
project that is no longer maintained (github.com/pytorch/torchdistx).

The recording exists because a run must begin with the same bits on any number of ranks, whatever the constructor does.
The meta device with `reset_parameters` begins with other values, because constructors also fill tensors outside of that
method, in another order, or after reading a value. Building the model on one rank and sending shards to the others
keeps the bits, but that rank's host then needs memory for the whole model, which sharding is there to avoid.
"""

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from steadfast.data.order import keyed_hash
from steadfast.errors import NotDeferrable
from steadfast.parallel.dtensor import is_sharded, on_mesh_of, sharded_like

_aten = torch.ops.aten
# Operations that only allocate: memory for their results is allocated at the first write.
_ALLOCATE = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
# Operations that overwrite all of their first argument, so that its former values need not be computed.
_OVERWRITE = {
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.fill_.Scalar,
    _aten.fill_.Tensor,
    _aten.zero_.default,
    _aten.copy_.default,
}


@dataclass(frozen=True)
class _Place:
    """Position of a tensor in a recorded storage, which may have no values yet."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)

    def covers(self, num_bytes: int) -> bool:
        """Return whether the tensor fills a storage of `num_bytes`."""
        return torch.Size(self.size).numel() * self.dtype.itemsize == num_bytes


@dataclass
class _Operation:
    """Recorded torch operation that writes to storages, for execution later.

    A `_Place` stands for each tensor among the arguments and results.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[_Place | None, ...]  # results with a storage of their own
    written: frozenset[int]  # storages, including those of the results
    read: frozenset[int]
    overwritten: int | None  # storage that the call overwrites without reading it
    # Only for random operations: the generator's state before the operation, or the operation that leaves this state;
    # and the state after the operation, once it is known.
    draws_after: "Tensor | _Operation | None" = None
    state_after: Tensor | None = None

    def set_state_before(self) -> None:
        """Set the generator to the state from which a random operation draws."""
        state = self.draws_after
        if isinstance(state, _Operation):
            state = state.state_after
        assert state is not None
        torch.set_rng_state(state)


class _Tape:
    """Record of all operations of a construction, in order."""

    def __init__(self) -> None:
        self._operations: list[_Operation] = []
        # Storages are numbered by their address. The table keeps them alive, so that no number is used again.
        self._recorded: dict[int, torch.UntypedStorage] = {}
        self._given: set[int] = set()  # storages that had values from the beginning
        self._represented: dict[bytes, _Operation] = {}  # by the state that represents the state after the operation

    def place(self, tensor: Tensor) -> _Place:
        """Return the place of a tensor, fake or real."""
        if tensor.is_conj() or tensor.is_neg() or tensor.layout != torch.strided:
            raise NotDeferrable(f"a tensor of layout {tensor.layout} or with a lazy conjugation")
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._recorded:
            self._recorded[key] = storage
            if not isinstance(tensor, FakeTensor):
                self._given.add(key)
        return _Place(key, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def add(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Record a call other than a view or an allocation."""
        args, kwargs = pytree.tree_map_only(Tensor, self.place, (args, kwargs))
        read = _storages((args, kwargs))
        results: list[_Place | None] = []
        for tensor in pytree.tree_leaves(result):
            place = None
            if isinstance(tensor, Tensor):
                place = self.place(tensor)
                # A result in the storage of an argument is a view, or the argument itself, and is not computed again.
                if place.storage in read:
                    place = None
            results.append(place)
        written = _storages(results) | self._changed(function, args, kwargs)
        if not written or function in _ALLOCATE:
            return
        overwritten = None
        if function in _OVERWRITE and args[0].covers(self._recorded[args[0].storage].nbytes()):
            overwritten = args[0].storage
            read = _storages((args[1:], kwargs))
        operation = _Operation(function, args, kwargs, tuple(results), written, read, overwritten)
        if torch.Tag.nondeterministic_seeded in function.tags:
            if kwargs.get("generator") is not None:
                raise NotDeferrable("random numbers of a generator of its own")
            self._take_turn(operation)
        self._operations.append(operation)

    @staticmethod
    def _changed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
        """Return the storages that a call writes in place."""
        changed: set[int] = set()
        for position, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = kwargs.get(argument.name)
                if position < len(args):
                    given = args[position]
                changed |= _storages(given)
        return frozenset(changed)

    def _take_turn(self, operation: _Operation) -> None:
        """Record the generator's state from which an operation draws."""
        # Nothing is drawn now. Instead the generator gets a unique state that represents the state after this
        # operation. User code that saves the generator's state and sets it again, as fork_rng does, then sets the
        # represented state.
        with _disable_current_modes():
            state = torch.get_rng_state()
            operation.draws_after = self._represented.get(state.numpy().tobytes(), state)
            torch.manual_seed(keyed_hash(len(self._operations), torch.initial_seed()))
            self._represented[torch.get_rng_state().numpy().tobytes()] = operation

    def value(self, tensor: Tensor) -> Tensor:
        """Compute the values of a fake tensor."""
        place = self.place(tensor)
        found: list[Tensor] = []
        self.compute({place.storage}, lambda _, storage: found.append(place.of(storage)))
        return found[0]

    def compute(self, wanted: set[int], take: Callable[[int, torch.UntypedStorage], None]) -> None:
        """Compute the contents of the `wanted` storages, and call `take`.

        A storage is passed as soon as it is complete, and is valid until `take` returns.
        """
        needed = self._needed(wanted)
        last_use: dict[int, int] = {}
        for number, operation in enumerate(self._operations):
            if needed[number]:
                last_use |= dict.fromkeys(operation.written | operation.read, number)
        storages: dict[int, torch.UntypedStorage] = {}
        with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            for number, operation in enumerate(self._operations):
                if needed[number]:
                    self._execute(operation, storages)
                    # A storage is dropped after its last use, so that memory holds few of them at a time.
                    for key in operation.written | operation.read:
                        if last_use[key] == number:
                            storage = storages.pop(key)
                            if key in wanted:
                                take(key, storage)
                elif operation.draws_after is not None and operation.state_after is None:
                    # Its values are not needed, but a later draw begins with the generator's state after this one.
                    self._execute(operation, {})
            for key in wanted - last_use.keys():
                take(key, self._storage(key, {}))

    def _needed(self, wanted: set[int]) -> list[bool]:
        """Return which operations the `wanted` storages depend on."""
        needed = [False] * len(self._operations)
        storages = set(wanted)
        for number in reversed(range(len(self._operations))):
            operation = self._operations[number]
            if operation.written.isdisjoint(storages):
                continue
            needed[number] = True
            # What a storage held before the operation that creates it, or overwrites all of it, is not needed.
            storages -= _storages(operation.results)
            storages.discard(operation.overwritten)
            storages |= operation.read
        return needed

    def _execute(self, operation: _Operation, storages: dict[int, torch.UntypedStorage]) -> None:
        def tensor(place: _Place) -> Tensor:
            return place.of(self._storage(place.storage, storages))

        args, kwargs = pytree.tree_map_only(_Place, tensor, (operation.args, operation.kwargs))
        if operation.draws_after is not None:
            operation.set_state_before()
        found = operation.function(*args, **kwargs)
        if operation.draws_after is not None:
            operation.state_after = torch.get_rng_state()
        for place, result in zip(operation.results, pytree.tree_leaves(found), strict=True):
            if place is not None:
                num_bytes, storage = self._recorded[place.storage].nbytes(), result.untyped_storage()
                # A real kernel may use another memory layout than the one recorded without values.
                if result.stride() != place.stride or storage.nbytes() != num_bytes:
                    storage = torch.UntypedStorage(num_bytes)
                    place.of(storage).copy_(result)
                storages[place.storage] = storage

    def _storage(self, key: int, storages: dict[int, torch.UntypedStorage]) -> torch.UntypedStorage:
        if key in storages:
            return storages[key]
        if key in self._given:
            # A copy, because another computation must begin with the same values.
            storages[key] = self._recorded[key].clone()
        else:
            storages[key] = torch.zeros(self._recorded[key].nbytes(), dtype=torch.uint8).untyped_storage()
        return storages[key]


def _storages(tree: Any) -> frozenset[int]:
    """Return the storages of all places in a tree."""
    return frozenset(leaf.storage for leaf in pytree.tree_leaves(tree) if isinstance(leaf, _Place))


class _Recorder(TorchDispatchMode):
    """Records all calls, and computes values that user code reads."""

    def __init__(self, tape: _Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape
        self._made: list[weakref.ref[Tensor]] = []  # all fake tensors

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # User code reads a number, for example by `item()` or in an `if`, and cannot continue without its value.
        if func is _aten._local_scalar_dense.default:
            with _disable_current_modes():
                return self._tape.value(args[0]).item()
        if func is _aten.lift_fresh.default:  # makes a tensor from numbers that were just read
            func = _aten.clone.default
        result = func(*args, **kwargs)
        self._tape.add(func, args, kwargs, result)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, FakeTensor):
                self._made.append(weakref.ref(tensor))
        return result

    def has_living_tensors(self) -> bool:
        """Return whether something still refers to a fake tensor."""
        return any(made() is not None for made in self._made)


class InitialValues:
    """Initial values of a model, computed on demand."""

    def __init__(self, tape: _Tape, places: Mapping[str, _Place]) -> None:
        self._tape = tape
        self._places = places  # by the name of a parameter or buffer

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Write this rank's initial values of parameters and buffers."""
        names: dict[int, list[str]] = {}
        for name in tensors:
            names.setdefault(self._places[name].storage, []).append(name)

        def take(key: int, storage: torch.UntypedStorage) -> None:
            for name in names[key]:
                held = tensors[name].detach()
                held.copy_(sharded_like(held, self._places[name].of(storage).to(held.dtype)))

        self._tape.compute(set(names), take)


def build_without_memory(build: Callable[[], nn.Module]) -> tuple[nn.Module, InitialValues]:
    """Build a module on the meta device, with its initial values.

    Raises:
        NotDeferrable: the construction cannot be recorded. Any error of `build` raises this too, because the missing
            values may have caused it.
    """
    with torch.random.fork_rng(devices=[]):
        tape = _Tape()
        recorder = _Recorder(tape)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        try:
            with fake, recorder, warnings.catch_warnings():
                # A deep copy tests whether there is memory, and warns.
                warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
                model = build()
            places = _move_to_meta(model, tape)
        except NotDeferrable:
            raise
        except Exception as error:
            raise NotDeferrable(f"{type(error).__name__}: {error}") from error
        # A tensor may only be waiting for the garbage collection, as a part of a reference cycle.
        if recorder.has_living_tensors():
            gc.collect()
            if recorder.has_living_tensors():
                raise NotDeferrable("a tensor is kept elsewhere than among parameters, buffers and attributes")
    return model, InitialValues(tape, places)


def allocate(
    model: nn.Module, device: torch.device, kept: Mapping[str, Tensor] | None = None, offloads: bool = False
) -> None:
    """Allocate memory for this rank's part of a meta model.

    The memory is not initialized.

    Args:
        device: device of the memory.
        kept: tensors of former parameters by name, whose memory is used again.
        offloads: whether shards are kept in host memory instead.
    """
    named = dict(model.named_parameters())
    given: dict[Tensor, Tensor] = {}
    for name, tensor in (kept or {}).items():
        given[named[name]] = tensor
    holders: dict[Tensor, list[tuple[dict[str, Any], str]]] = {}
    for held, name, tensor in _held_tensors(model):
        holders.setdefault(tensor, []).append((held, name))

    def memory_of(tensor: Tensor) -> Tensor:
        if tensor in given:
            return on_mesh_of(given[tensor], tensor) if is_sharded(tensor) else given[tensor]
        # CPU offload keeps only sharded parameters in host memory: a forward uses buffers on the device.
        if offloads and is_sharded(tensor):
            return torch.empty_like(tensor, device="cpu")
        return torch.empty_like(tensor, device=device)

    model._apply(memory_of)  # as `to_empty` does
    # `_apply` makes two tensors of one that has two names, so the names are joined again.
    for (first, first_name), *others in holders.values():
        for held, name in others:
            held[name] = first[first_name]


def _held_tensors(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield each parameter and buffer, with the dictionary and the name by which its module holds the tensor."""
    for module in model.modules():
        for held in (vars(module)["_parameters"], vars(module)["_buffers"]):
            for name, tensor in held.items():
                if tensor is not None:
                    yield held, name, tensor


def _move_to_meta(model: nn.Module, tape: _Tape) -> dict[str, _Place]:
    """Replace the fake tensors of a model by meta tensors.

    Returns the place of each parameter and buffer by name. From its place the tape computes a tensor's initial values.
    """
    places: dict[str, _Place] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        places[name] = tape.place(tensor)
    moved: dict[Tensor, Tensor] = {}
    for held, name, tensor in _held_tensors(model):
        held[name] = moved.setdefault(tensor, _on_meta(tensor))  # a shared tensor stays shared
    for module in model.modules():
        _compute_attributes(module, tape, moved)
    return places


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    if not isinstance(tensor, nn.Parameter):
        return empty
    param = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    # Users set attributes on parameters, for example for their optimizer. The attributes that every fake tensor has are
    # torch's own.
    own = dict(vars(tensor))
    if isinstance(tensor, FakeTensor):
        for name in (*vars(tensor.fake_mode.from_tensor(torch.empty(0))), "_is_param"):
            own.pop(name, None)
    vars(param).update(own)
    return param


def _compute_attributes(module: nn.Module, tape: _Tape, moved: Mapping[Tensor, Tensor]) -> None:
    """Compute the tensors among a module's plain attributes, which no checkpoint has."""

    def number(tensor: FakeTensor) -> Tensor:
        return moved[tensor] if tensor in moved else tape.value(tensor)

    for name, value in vars(module).items():
        if name not in ("_parameters", "_buffers", "_modules"):
            vars(module)[name] = pytree.tree_map_only(FakeTensor, number, value)
