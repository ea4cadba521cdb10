"""CLIP as it is usually written: the loss gathers the embeddings of all ranks."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steadfast import Sums
from tests.programs.contrastive import Model, contrast, data
from tests.programs.program import BOTH, Program

__all__ = ["Model", "data"]


def gathered(own: Tensor) -> Tensor:
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own.detach())
    parts[dist.get_rank()] = own
    return torch.cat(parts)


class Task:
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        images, texts = model(*batch)
        return Sums(contrast(gathered(images), gathered(texts)), len(images))


PROGRAM = Program(
    __name__,
    "CLIP with `all_gather` in the loss",
    words=("task.coupled=true",),
    refused=dict.fromkeys(BOTH, "Task.loss calls a collective over all workers"),
    advice="a task with `embed` and `loss(embeddings)`",
)
