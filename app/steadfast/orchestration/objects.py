"""Ship the objects that a program gave to `fit` to the workers."""

import re
import socket
from typing import Any

import ray

from steadfast.config import Config, Target
from steadfast.errors import UsageError

# Ray itself puts larger arguments of a call into its object store, once for each call. Larger objects are put there
# once for the run.
_INLINE_BYTES = 64 * 2**10
# Key of a section -> argument of `fit`, if the names differ.
_ARGUMENTS = {
    "data": "dataset",
    "data.validation": "validation",
    "data.collate": "collate",
    "data.validation.collate": "validation_collate",
    "data.order": "order",
}


def pack_objects(config: Config) -> bytes:
    """Pickle the objects of a configuration; return b"" if there are none.

    Raises:
        UsageError: an object cannot be pickled. The message names the argument of `fit`.
    """
    sections = {key: section for key, section in config.target_sections().items() if section.given is not None}
    if not sections:
        return b""
    try:
        # All objects are in one pickle, so that a part which two of them share is one object in a worker too.
        packed: bytes = ray.cloudpickle.dumps({key: section.given for key, section in sections.items()})
        return packed
    except Exception as error:
        for section in sections.values():
            _check_shippable(section)
        raise UsageError(f"the objects given to fit cannot be sent to workers: {error}") from error


def _check_shippable(section: Target) -> None:
    try:
        ray.cloudpickle.dumps(section.given)
    except Exception as error:
        raise UsageError(
            f"{_argument(section)} cannot be sent to workers: {error}. Create that part when it is first used, or "
            "leave it out in __getstate__; or train in this process, without scaling="
        ) from error


def _argument(section: Target) -> str:
    """Return the argument of `fit` that a section holds, with the name of the object."""
    key, _, name = section.target.removeprefix("<live ").partition(">:")
    argument = _ARGUMENTS.get(key, re.sub(r"\.(\d+)$", r"[\1]", key))
    return f"{argument}: this {name}"


class Objects:
    """Pickled objects of a run, which every worker loads."""

    def __init__(self, packed: bytes) -> None:
        self._packed: Any = packed
        if len(packed) > _INLINE_BYTES:
            self._packed = ray.put(packed)

    def give_to(self, config: Config) -> None:
        """Put the objects into the sections of a worker's configuration.

        Raises:
            UsageError: an object cannot be loaded on this machine.
        """
        packed = self._packed
        if isinstance(packed, ray.ObjectRef):
            packed = ray.get(packed)
        if not packed:
            return
        try:
            objects = ray.cloudpickle.loads(packed)
        except Exception as error:
            raise UsageError(
                f"the objects given to fit cannot be loaded on {socket.gethostname()}: {type(error).__name__}: "
                f"{error}. Modules that the objects use must be importable there. Only code of the program's main file "
                "or of a notebook is sent along"
            ) from error
        sections = config.target_sections()
        for key, given in objects.items():
            sections[key].hold(given)

    def close(self) -> None:
        """Let Ray's object store delete the objects."""
        self._packed = b""
