"""The example's GPT-2 with a part that is frozen and in evaluation mode, and a spy that tells what forwards see."""

from __future__ import annotations

import json
from typing import Any

import torch

from tests.examples import gpt2


def model(pretrained: str, told: str) -> Any:
    watched = gpt2.model(pretrained)
    assert not watched.training  # as from_pretrained leaves it
    assert watched.transformer.drop.p > 0
    watched.train()
    watched.transformer.h[0].eval().requires_grad_(False)

    def tell(*_: object) -> None:
        modes = {"dropout": watched.transformer.drop.training, "frozen": watched.transformer.h[0].training}
        with open(told, "a") as file:
            file.write(json.dumps({"gradients": torch.is_grad_enabled(), **modes}) + "\n")

    watched.register_forward_pre_hook(tell)
    return watched
