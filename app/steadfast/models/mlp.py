"""Stack of linear layers with GELU activations."""

from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from steadfast.config import MlpConfig


class Mlp(nn.Module):
    """Multilayer perceptron on flattened inputs, for classes or numbers."""

    def __init__(self, config: MlpConfig) -> None:
        super().__init__()
        widths = (config.in_features, *config.hidden, config.out_features)
        layers: list[nn.Module] = [nn.Flatten()]
        for width, next_width in pairwise(widths):
            layers += [nn.Linear(width, next_width), nn.GELU(), nn.Dropout(config.dropout)]
        # The last layer has neither activation nor dropout.
        self.layers = nn.Sequential(*layers[:-2])

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (batch, ...) to outputs (batch, out_features).

        Each input flattens to in_features numbers.
        """
        return cast(Tensor, self.layers(inputs))

    def flops_per_sample(self) -> int:
        """Return the training FLOPs of a sample: 6 per parameter."""
        return 6 * sum(map(torch.numel, self.parameters()))
