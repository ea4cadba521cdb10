"""Models, built from their config. `flops_per_sample` and `blocks` are methods that the user's own may leave out."""

from torch import nn

from app.config import GptConfig, MlpConfig, Target
from app.config.target import build_target
from app.errors import ConfigError, Problem
from app.models.gpt import Gpt
from app.models.mlp import Mlp


def build_model(config: GptConfig | MlpConfig | Target) -> nn.Module:
    """Build the module that the config names, initialised from torch's global generator: seed it alike on all ranks."""
    match config:
        case GptConfig():
            return Gpt(config)
        case MlpConfig():
            return Mlp(config)
    model = build_target(config.target, config.args, "model")
    # A function in place of a class is fine, as long as it returns a module.
    if not isinstance(model, nn.Module):
        what = f'"{config.target}" gave a {type(model).__name__}, not a torch.nn.Module'
        raise ConfigError([Problem("", "model.target", what)])
    return model
