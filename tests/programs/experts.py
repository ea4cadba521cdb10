"""A mixture of experts of which most microbatches, and some steps, leave experts unused."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from steadfast import Sums
from tests.programs.program import Program, Trained, build, integers, numbers, optimized_by, train, whole_batches

EXPERTS = 8


class Model(nn.Module):
    """Sends each sample to the expert that its domain names; the last expert has no samples."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(EXPERTS))
        self.head = nn.Linear(4, 1)

    def blocks(self) -> list[nn.Module]:
        """Return no layer for fsdp to gather by itself: all workers have to gather the same ones."""
        return []

    def forward(self, inputs: Tensor, domains: Tensor) -> Tensor:
        found = torch.zeros_like(inputs)
        for number, expert in enumerate(self.experts):
            members = (domains == number).nonzero()[:, 0]
            if len(members):
                found = found.index_add(0, members, torch.tanh(expert(inputs[members])))
        return torch.as_tensor(self.head(found)[:, 0])


def data() -> TensorDataset:
    domains = integers(40, 33).clamp(max=EXPERTS - 2)  # most are of one domain
    inputs = numbers(33, 4)
    return TensorDataset(inputs, domains, inputs.sum(1).sin())


def plain() -> Trained:
    model = build(Model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return train(model, whole_batches(data()), lambda batch: (model(*batch[:2]) - batch[2]).square().mean(), optimizer)


class Task:
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Sums:
        inputs, domains, wanted = batch
        return Sums((model(inputs, domains) - wanted).square().sum(), len(wanted))


PROGRAM = Program(
    __name__,
    "experts and branches that a step does not use",
    plain,
    words=(optimized_by("torch.optim:AdamW", weight_decay=0.1),),
    advice="under fsdp the model's `blocks()` names no layer that a forward may leave out",
)
