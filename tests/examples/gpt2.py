"""Hugging Face's GPT-2. `python -m tests.examples.gpt2 FOLDER` writes a small random one, as a hub would hold it."""

import sys
from typing import Any

import tests.examples.operators  # noqa: F401 - transformers imports torchvision where it is installed


def model(pretrained: str | None = None) -> Any:
    """The model in a folder of `save_pretrained`, or one of a hub; without a name a small random one, for bytes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    if pretrained is not None:
        return GPT2LMHeadModel.from_pretrained(pretrained)
    size = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 3, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))


if __name__ == "__main__":
    model().save_pretrained(sys.argv[1])
