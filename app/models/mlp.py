"""A stack of linear layers with GELU between them."""

from itertools import pairwise
from typing import cast

from torch import Tensor, nn

from app.config import MlpConfig


class Mlp(nn.Module):
    """Maps flattened inputs to classes, or to numbers."""

    def __init__(self, config: MlpConfig) -> None:
        super().__init__()
        widths = (config.in_features, *config.hidden, config.out_features)
        layers: list[nn.Module] = [nn.Flatten()]
        for width, next_width in pairwise(widths):
            layers += [nn.Linear(width, next_width), nn.GELU(), nn.Dropout(config.dropout)]
        # The output has neither activation nor dropout.
        self.layers = nn.Sequential(*layers[:-2])

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (batch, ...) that flatten to in_features to (batch, out_features)."""
        return cast(Tensor, self.layers(inputs))

    def flops_per_sample(self) -> int:
        """Return training FLOPs, forward and backward: 6 for each parameter."""
        return 6 * sum(parameter.numel() for parameter in self.parameters())
