"""A run that is small enough to do many times, and has everything that could depend on who computes what."""

import random
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from steadfast.config import Config, parse_config
from steadfast.data.batches import Batch
from steadfast.tasks import IGNORED, LanguageModeling, Sums

CONTEXT, VOCABULARY = 6, 19

# 7 microbatches of 2, the last of 1: neither 2 nor 3 workers share them evenly.
RUN = f"""
batch:     {{global_size: 13, microbatch_size: 2}}
model:     {{kind: gpt, num_layers: 2, num_heads: 2, embed_dim: 12, context_length: {CONTEXT},
            vocab_size: {VOCABULARY}, dropout: 0.1}}
data:      {{target: "tests.support.small:Tokens"}}
optimizer: {{kind: adamw, lr: 1.0e-2, max_grad_norm: 0.5}}
schedule:  {{kind: cosine, warmup_steps: 3}}
precision: {{kind: fp64}}
trackers:  []
"""


def small(storage: Path | str, *overrides: str) -> Config:
    """The small run, kept under `storage`; 14 steps unless the overrides say otherwise."""
    length = () if any(override.startswith("run.epochs") for override in overrides) else ("run.steps=14",)
    return parse_config(RUN, "small.yaml", [f"run.storage={storage}", *length, *overrides])


# A run of which `plan` says all in a moment.
PLANNED = """
run: {steps: 100}
scaling: {num_workers: [2, 8]}
batch: {global_size: 12, microbatch_size: 2}
model: {num_layers: 2, embed_dim: 64, context_length: 64, num_heads: 2}
data: {context_length: 64}
schedule: {kind: cosine, warmup_steps: 20}
"""


# A configuration of a model, without any length.
MLP = """
model: {kind: mlp, in_features: 4, hidden: [3], out_features: 2}
task: {kind: classification}
data: {target: 'tests.support.small:Tokens'}
"""


def planned(*overrides: str) -> Config:
    return parse_config(PLANNED, "run.yaml", overrides)


class Tokens:
    """Random tokens. Every fourth sample counts for nothing at all, others lack up to half of their targets; and each
    time that a sample is read, one of its inputs is replaced at random."""

    units_per_sample = CONTEXT

    def __init__(self, num_samples: int = 61, masked: bool = True, all_generators: bool = False) -> None:
        """`all_generators` draws from those of Python and numpy too, as code of users does."""
        self._masked, self._all_generators = masked, all_generators
        self._tokens = torch.randint(VOCABULARY, (num_samples, CONTEXT + 1), generator=_generator(5))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        inputs, targets = self._tokens[index, :-1].clone(), self._tokens[index, 1:].clone()
        inputs[torch.randint(CONTEXT, ())] = torch.randint(VOCABULARY, ())
        if self._all_generators:
            inputs[random.randrange(CONTEXT)] = np.random.randint(VOCABULARY)
        if self._masked:
            targets[: CONTEXT if index % 4 == 0 else index % 4] = IGNORED
        return inputs, targets


class Drawing(LanguageModeling):
    """Weighs each loss by numbers from all generators that code of users draws from, in validation too."""

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        sums = super().loss(model, batch)
        weight = float(np.random.rand()) + random.random() + float(torch.rand(()))
        return Sums(sums.loss_sum * weight, sums.count)


DRAWING = "task.target=tests.support.small:Drawing"


class Split(Tokens):
    """One of two parts of all samples, which the constructor draws from one of the generators."""

    def __init__(self, part: int, generator: str) -> None:
        super().__init__(num_samples=66)
        match generator:
            case "torch":
                order = torch.randperm(66).tolist()
            case "numpy":
                order = np.random.permutation(66).tolist()
            case _:
                order = random.sample(range(66), 66)
        self.ids = order[:52] if part == 0 else order[52:]
        self._tokens = self._tokens[self.ids]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
