"""CLIP: a contrastive loss over the whole global batch."""

from torch import Tensor, nn

from steadfast import Sums
from tests.programs.contrastive import Model, contrast, data
from tests.programs.program import GLOBAL_SIZE, Program, Trained, build, train, whole_batches

__all__ = ["Model", "data"]


def plain() -> Trained:
    model = build(Model)
    return train(model, whole_batches(data()), lambda batch: contrast(*model(*batch)) / GLOBAL_SIZE)


class Task:
    def embed(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, texts = model(*batch)
        return images, texts

    def loss(self, embeddings: tuple[Tensor, Tensor]) -> Sums:
        return Sums(contrast(*embeddings), len(embeddings[0]))


PROGRAM = Program(
    __name__, "CLIP, negatives of the global batch", plain, advice="a task with `embed` and `loss(embeddings)`"
)
