"""Sharpness-aware minimization, which takes a second gradient in each step."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from tests.programs.nadam import Model, Task, data
from tests.programs.program import BOTH, Program, optimized_by

__all__ = ["Model", "Task", "data"]


class Sam(torch.optim.Optimizer):
    """SAM around SGD (Foret et al. 2021)."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, rho: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})

    def step(self, closure: Callable[[], Tensor]) -> None:  # type: ignore[override]
        for group in self.param_groups:
            climbed = []
            with torch.no_grad():
                norm = torch.nn.utils.get_total_norm([param.grad for param in group["params"]])
                for param in group["params"]:
                    climbed.append(group["rho"] / (norm + 1e-12) * param.grad)
                    param.add_(climbed[-1])
            with torch.enable_grad():
                closure()
            with torch.no_grad():
                for param, way in zip(group["params"], climbed, strict=True):
                    param.sub_(way + group["lr"] * param.grad)


PROGRAM = Program(
    __name__,
    "SAM",
    words=(optimized_by(f"{__name__}:Sam"),),
    refused=dict.fromkeys(BOTH, "Sam needs a closure, that is several forwards in a step"),
    advice="another optimizer",
)
