"""CLIP: a contrastive loss over the whole global batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from steadfast import Sums
from tests.programs.contrastive import Model, contrast, data
from tests.programs.program import GLOBAL_SIZE, Program, Trained, build, whole_batches

__all__ = ["Model", "data"]


def plain() -> Trained:
    model, dataset, losses = build(Model), data(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for ids in whole_batches(len(dataset)):
        optimizer.zero_grad()
        loss = contrast(*model(*dataset[ids])) / GLOBAL_SIZE
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained.of(losses, model)


class Task:
    def embed(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, texts = model(*batch)
        return images, texts

    def loss(self, embeddings: tuple[Tensor, Tensor]) -> Sums:
        return Sums(contrast(*embeddings), len(embeddings[0]))


PROGRAM = Program(
    __name__, "CLIP, negatives of the global batch", plain, advice="a task with `embed` and `loss(embeddings)`"
)
