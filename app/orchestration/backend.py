"""What Ray Train is told of how workers communicate: it forms no process groups, because the runtime does."""

# Ray's controller imports this module. It must not import torch, which would make every start 1.5 s longer.
from ray.train.backend import Backend, BackendConfig


class SlotBackend(Backend):
    has_replica_groups = True  # or Ray would end all workers when one is lost


class RuntimeConfig(BackendConfig):
    """Take the place of `TorchConfig`, whose backend would form process groups."""

    backend = "none"  # TorchTrainer asks for it


class SlotConfig(RuntimeConfig):
    backend_cls = SlotBackend
