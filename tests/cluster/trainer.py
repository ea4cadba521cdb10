"""`python -m tests.cluster.trainer RUN EXPORTED`: the run by transformers' own Trainer, and what was exported.

A process of its own: the libraries warn, and leave threads behind.
"""

import tests.examples.operators  # noqa: F401 - before transformers

# isort: split
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from steadfast.checkpoint.initial import build_initial
from steadfast.config import AdamWConfig, Config, LinearConfig, parse_config
from steadfast.data import build_dataset
from tests.examples import lora
from tests.support.checks import weights_of
from tests.support.reference import order_of


def main(directory: Path, exported: Path) -> None:
    config = parse_config((directory / "config.yaml").read_text())
    losses = {"trainer_loss": loss_of_trainer(config, directory), "difference": difference(config, directory, exported)}
    print(json.dumps(losses))


def loss_of_trainer(config: Config, directory: Path) -> float:
    """The loss on the held-out samples after as many steps over the same samples in the same order."""
    assert isinstance(config.optimizer, AdamWConfig)
    assert isinstance(config.schedule, LinearConfig)
    assert config.run.steps is not None
    dataset: Any = build_dataset(config.data)
    order = order_of(config)
    num_samples = config.run.steps * config.batch.global_size
    arguments = TrainingArguments(
        output_dir=str(directory / "trainer"),
        max_steps=config.run.steps,
        per_device_train_batch_size=config.batch.global_size,
        learning_rate=config.optimizer.lr,
        weight_decay=config.optimizer.weight_decay,
        adam_beta1=config.optimizer.betas[0],
        adam_beta2=config.optimizer.betas[1],
        adam_epsilon=config.optimizer.eps,
        max_grad_norm=config.optimizer.max_grad_norm,
        lr_scheduler_type="linear",
        warmup_steps=config.schedule.warmup_steps,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = InOrder(
        build_initial(config)[0],
        arguments,
        train_dataset=Subset(dataset, order.train(np.arange(num_samples)).tolist()),
    )
    trainer.train()
    held_out = order.validation(np.arange(order.num_validation)).tolist()
    return loss(trainer.model.eval(), torch.stack([dataset[index]["input_ids"] for index in held_out]))


@torch.no_grad()
def loss(model: Any, samples: Tensor) -> float:
    """The mean over predicted tokens. Not `trainer.evaluate`, which counts the first token too: nothing predicts it."""
    total = 0.0
    for batch in samples.split(64):
        total += float(model(input_ids=batch, labels=batch).loss) * len(batch)
    return total / len(samples)


class InOrder(Trainer):  # type: ignore[misc]
    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, self.args.per_device_train_batch_size)


def difference(config: Config, directory: Path, exported: Path) -> float:
    """The largest one of the logits of the model that the run ended with, and of what its library loads."""
    ran, _ = build_initial(config)
    ran.load_state_dict(weights_of(directory), strict=False)
    if (exported / "adapter_config.json").exists():
        from peft import PeftModel

        torch.manual_seed(config.run.seed)
        loaded = PeftModel.from_pretrained(lora.base(), exported)
    else:
        loaded = AutoModelForCausalLM.from_pretrained(exported)
    tokens = torch.stack([build_dataset(config.data)[index]["input_ids"] for index in range(8)])
    return float((logits(ran, tokens) - logits(loaded, tokens)).abs().max())


@torch.no_grad()
def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    found: Tensor = model.eval()(tokens).logits
    return found


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
