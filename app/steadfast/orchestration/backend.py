"""Ray Train backend that leaves process groups to the runtime."""

# Ray's controller imports this module. The module must not import torch, which would add 1.5 s to every start.
from ray.train.backend import Backend, BackendConfig


class SlotBackend(Backend):
    """Backend with which Ray keeps the workers that survive a death."""

    has_replica_groups = True  # otherwise Ray ends all workers when one is lost


class SlotConfig(BackendConfig):
    """Configuration with which `TorchTrainer` forms no process groups.

    Ray's `TorchConfig` would form process groups, but the workers form their own for each world.
    """

    backend = "none"  # TorchTrainer reads this attribute
    backend_cls = SlotBackend
