"""Distillation: a student learns from labels and from a frozen teacher."""

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

from steadfast import Sums
from tests.programs.mixup import data
from tests.programs.program import Program, Trained, build, train, whole_batches

__all__ = ["data"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
        self.teacher.requires_grad_(False).eval()
        self.student = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.student(inputs), self.teacher(inputs)


def distilled(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the loss at temperature 2, summed over samples."""
    student, teacher = model(inputs)
    apart = kl_div((student / 2).log_softmax(1), (teacher / 2).log_softmax(1), reduction="sum", log_target=True)
    return 4 * 0.7 * apart + 0.3 * cross_entropy(student, labels, reduction="sum")


def plain() -> Trained:
    model = build(Model)
    return train(model, whole_batches(data()), lambda batch: distilled(model, *batch) / len(batch[0]))


class Task:
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        return Sums(distilled(model, *batch), len(batch[0]))


PROGRAM = Program(__name__, "distillation: a frozen teacher in evaluation mode", plain)
