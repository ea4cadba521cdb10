"""Ray Train's view of how workers communicate. Its controller imports this module, so it must not import torch, which
would cost every start a second and a half."""

from __future__ import annotations

from ray.train.backend import Backend, BackendConfig


class NoProcessGroups(Backend):
    """Ray starts the workers; the runtime forms the process groups, a new generation for every world."""


class NoProcessGroupsInSlots(NoProcessGroups):
    has_replica_groups = True  # a worker that is lost is not the end of the others


class RuntimeConfig(BackendConfig):
    """In place of `TorchConfig`."""

    backend = "none"  # TorchTrainer asks for it

    def __init__(self, slots: bool) -> None:
        self._slots = slots

    @property
    def backend_cls(self) -> type[Backend]:
        return NoProcessGroupsInSlots if self._slots else NoProcessGroups
