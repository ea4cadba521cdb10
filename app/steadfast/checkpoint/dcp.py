"""Read and write weights in the format of `torch.distributed.checkpoint` (DCP), a folder with a file `.metadata`."""

import contextlib
import pathlib
import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata

from steadfast.checkpoint.initial import METADATA, inside

_MODEL = "model"
# Everything else that a pickle names could run code.
_CLASSES: dict[tuple[str, str], Any] = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (*metadata.__all__, "_MEM_FORMAT_ENCODING")
        if hasattr(metadata, name)
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib", "WindowsPath"): pathlib.PureWindowsPath,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}


def read_dcp(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a model by name.

    If the program saved a dictionary with an entry `model`, the tensors are those of this entry.

    Raises:
        UnpicklingError: the metadata name a class that does not belong there.
        OSError, ValueError, RuntimeError: the folder is damaged.
    """
    reader = _Reader(folder)
    found = reader.read_metadata()
    paths: Mapping[str, tuple[Any, ...]] = found.planner_data or {}
    tensors: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    has_model = any(_MODEL in path[:-1] for path in paths.values())
    for key, described in found.state_dict_metadata.items():
        path = paths.get(key, (key,))
        if not isinstance(described, metadata.TensorStorageMetadata) or (has_model and _MODEL not in path[:-1]):
            continue
        if has_model:
            path = path[path.index(_MODEL) + 1 :]
        names[key] = ".".join(map(str, path))
        tensors[key] = torch.empty(described.size, dtype=described.properties.dtype)
    if not tensors:
        raise ValueError("it holds no tensors of a model")
    with _alone():
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return {names[key]: tensor for key, tensor in tensors.items()}


def write_dcp(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write tensors as the entry `model`."""
    with _alone():
        dcp.save({_MODEL: dict(weights)}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Silence torch's warning that a single process reads or writes. Raises OSError if a file is damaged."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            yield
        except dcp.api.CheckpointException as error:
            [(cause, _)] = error.failures.values()
            raise OSError(f"{type(cause).__name__}: {cause}") from error


class _Reader(dcp.FileSystemReader):
    """Reader that runs no code of the folder's."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        with (Path(self.path) / METADATA).open("rb") as file:
            found = _Unpickler(file).load()
        if not isinstance(found, metadata.Metadata):
            raise ValueError(f"{METADATA} holds a {type(found).__name__}")
        for info in (found.storage_data or {}).values():
            if not isinstance(info, filesystem._StorageInfo):
                raise ValueError(f"{METADATA} has a place of the type {type(info).__name__}")
            inside(Path(self.path), str(info.relative_path))
        found.storage_meta = found.storage_meta or metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, name: str, /) -> Any:
        if (module_name, name) in _CLASSES:
            return _CLASSES[module_name, name]
        found = getattr(torch, name, None) if module_name == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{METADATA} names {module_name}.{name}, which does not belong there")
