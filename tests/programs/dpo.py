"""Direct preference optimization, against a frozen copy of the model."""

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from torch.utils.data import TensorDataset

from steadfast import Sums
from tests.programs.program import Program, Trained, build, integers, optimized_by, train, whole_batches

WORDS, LENGTH = 11, 5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Embedding(WORDS, 8), nn.Tanh(), nn.Linear(8, WORDS))
        self.reference = copy.deepcopy(self.policy).requires_grad_(False).eval()

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return how much more than the reference the policy prefers each chosen text, (samples,)."""
        gains = []
        for text in (chosen, rejected):
            own, other = (log_prob(network, text) for network in (self.policy, self.reference))
            gains.append(own - other)
        return gains[0] - gains[1]


def log_prob(network: nn.Module, text: Tensor) -> Tensor:
    """Return the log probability of each text behind its first word, (samples,)."""
    scores = network(text[:, :-1]).log_softmax(-1)
    return torch.as_tensor(scores.gather(2, text[:, 1:, None]).sum((1, 2)))


def data() -> TensorDataset:
    return TensorDataset(integers(WORDS, 33, LENGTH, seed=1), integers(WORDS, 33, LENGTH, seed=2))


def plain() -> Trained:
    model = build(Model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return train(model, whole_batches(data()), lambda batch: -logsigmoid(0.5 * model(*batch)).mean(), optimizer)


class Task:
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        return Sums(-logsigmoid(0.5 * model(*batch)).sum(), len(batch[0]))


PROGRAM = Program(__name__, "DPO: a frozen reference model", plain, words=(optimized_by("torch.optim:AdamW"),))
