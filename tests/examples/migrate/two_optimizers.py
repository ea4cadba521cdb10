"""SGD for the first two parameters and Adam for the others, as one optimizer."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class Both(torch.optim.Optimizer):
    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        params = list(params)
        super().__init__(params, {"lr": lr})
        self.members = [torch.optim.SGD(params[:2], lr, momentum=0.9), torch.optim.Adam(params[2:], lr)]
        self.param_groups = [group for member in self.members for group in member.param_groups]
        for member in self.members:
            member.state = self.state  # checkpoints hold this one state

    def step(self, closure: Any = None) -> Any:
        for member in self.members:
            member.step()
