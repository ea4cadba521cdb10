"""Truncated backpropagation through time: each step goes on with the hidden state of the step before."""

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from steadfast import Sums
from tests.programs.program import STEPS, Program, Trained, build, numbers, train

LANES, CHUNK = 5, 4  # sequences that are read side by side; time steps of a chunk


class Model(nn.Module):
    """Keeps its hidden state in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.head = nn.LSTM(2, 6, batch_first=True), nn.Linear(6, 1)
        self.hidden: Tensor
        self.cell: Tensor
        for name in ("hidden", "cell"):
            self.register_buffer(name, torch.zeros(1, LANES, 6))

    def forward(self, chunk: Tensor) -> Tensor:
        found, (hidden, cell) = self.memory(chunk, (self.hidden, self.cell))
        self.hidden, self.cell = hidden.detach(), cell.detach()
        return torch.as_tensor(self.head(found))


def data() -> TensorDataset:
    """Return the chunks of all lanes, those of one moment behind each other."""
    signal = numbers(STEPS * LANES, CHUNK, 2).cumsum(1)
    return TensorDataset(signal, signal.sum(2, keepdim=True).sin())


def plain() -> Trained:
    model, dataset = build(Model), data()
    chunks = (dataset[step * LANES : (step + 1) * LANES] for step in range(STEPS))
    return train(model, chunks, lambda chunk: mse_loss(model(chunk[0]), chunk[1]))


class Task:
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        chunk, wanted = batch
        return Sums(mse_loss(model(chunk), wanted, reduction="sum"), wanted.numel())


PROGRAM = Program(
    __name__,
    "stateful LSTM, truncated backpropagation",
    plain,
    words=("data.order=sequential", f"batch={{global_size: {LANES}, microbatch_size: {LANES}}}", "task.coupled=true"),
    advice="`data.order: sequential`, the state in buffers, one microbatch a step, `task.coupled: true`",
)
