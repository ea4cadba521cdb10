"""BatchNorm whose statistics are those of one microbatch of every worker."""

from torch import nn

from tests.programs.nadam import Task, data
from tests.programs.program import BOTH, Program

__all__ = ["Task", "data"]


def Model() -> nn.Module:  # noqa: N802
    return nn.Sequential(nn.Linear(4, 8), nn.SyncBatchNorm(8), nn.Linear(8, 1))


PROGRAM = Program(
    __name__,
    "SyncBatchNorm",
    refused=dict.fromkeys(BOTH, "is a SyncBatchNorm: it mixes one microbatch of every worker"),
    advice="BatchNorm, GroupNorm or LayerNorm",
)
