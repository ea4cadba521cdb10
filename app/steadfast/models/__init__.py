"""Build the model of the configuration.

A model may have the methods `flops_per_sample` and `blocks`; a model of the user's own may leave them out.
"""

from torch import nn

from steadfast.config import GptConfig, MlpConfig, Target
from steadfast.config.target import build_target
from steadfast.errors import ConfigError, Problem
from steadfast.models.gpt import Gpt
from steadfast.models.mlp import Mlp


def build_model(config: GptConfig | MlpConfig | Target) -> nn.Module:
    """Build the configured model with random initial weights.

    The weights follow from torch's global generator, which must have the same seed on all ranks.
    """
    match config:
        case GptConfig():
            return Gpt(config)
        case MlpConfig():
            return Mlp(config)
    model = build_target(config, "model")
    # The target may be a function instead of a class, if the function returns a module.
    if not isinstance(model, nn.Module):
        what = f'"{config.target}" returned a {type(model).__name__}, not a torch.nn.Module'
        raise ConfigError([Problem("", "model.target", what)])
    return model
