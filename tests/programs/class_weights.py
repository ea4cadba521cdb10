"""Classification with label smoothing and weights of classes, whose mean is a weighted one."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from steadfast import Sums
from tests.programs.mixup import Model, data
from tests.programs.program import Program, Trained, build, train, whole_batches

__all__ = ["Model", "data"]
WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)


def plain() -> Trained:
    model = build(Model)
    criterion = nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1)
    return train(model, whole_batches(data()), lambda batch: criterion(model(batch[0]), batch[1]))


class Task:
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        inputs, labels = batch
        loss_sum = cross_entropy(model(inputs), labels, WEIGHTS, reduction="sum", label_smoothing=0.1)
        return Sums(loss_sum, WEIGHTS[labels].sum())


PROGRAM = Program(__name__, "label smoothing and class weights", plain, advice="`Sums.count` is the sum of the weights")
