"""All programs, in the order of the page for users."""

from importlib import import_module

from tests.programs.program import Program

_NAMES = (
    "experts gan distillation dpo ppo batchnorm ddpm vae mixup mixup_collate contrastive contrastive_coupled clip "
    "clip_gathered ctc seq2seq class_weights tied own_function gradient_penalty penalty_in_loss lstm weighted nadam "
    "methods part_of_model returns_loss lbfgs sam sparse synchronized stream"
)
PROGRAMS: tuple[Program, ...] = tuple(import_module(f"tests.programs.{name}").PROGRAM for name in _NAMES.split())
