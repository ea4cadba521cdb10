"""Memory of tensors over time, counted even for tensors without data."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_resize: Any = torch.UntypedStorage.resize_
_DEVICE = torch.ops.prim.device.default


class Allocations(TorchDispatchMode):
    """Counts the bytes of all tensors within the context.

    Attributes:
        bytes: current sum.
        peak_bytes: largest sum so far.
    """

    # torch's own MemTracker also groups bytes by module, and refuses a second microbatch.
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}  # by storage

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that exist already."""
        for tensor in tensors:
            self._count(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A DTensor calls operators on its local tensor, and these calls are dispatched here too. Its module is not
        # imported here, because that takes a second.
        if any(hasattr(each, "full_tensor") for each in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func is _DEVICE:  # frequent, and returns no tensor
            return result
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def __enter__(self) -> Any:
        def resize(storage: Any, size: Any) -> Any:
            resized = _resize(storage, size)
            if storage._cdata in self._sizes:
                self._count(storage)
            return resized

        # `resize_` is not an operator, and FSDP frees gathered parameters by it.
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def _count(self, storage: torch.UntypedStorage) -> None:
        # The key is the address of the storage object, because its data may not exist.
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._forget, key)
        self.bytes += storage.nbytes() - self._sizes[key]
        self._sizes[key] = storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def _forget(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key)
