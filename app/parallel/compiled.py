"""Compilation by torch.compile: repeated layers and a loss, for one shape of their inputs, in training alone.

What is compiled are the functions that the layers share, not the layers. So one compilation serves all layers of a
class, and those of the models that later attempts build: torch finds the code of a function by the function.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from app.config import Compile
from app.errors import TrainingError, UsageError
from app.parallel.blocks import blocks_of, stop_caching
from app.run.events import Event
from app.tasks import LanguageModeling
from app.world.compilation import CompilerNews, is_compiler_failure, one_line

Forward = Callable[..., Any]  # of a layer, which is its first argument


class CompiledBlocks:
    """The compiled layers of the models that this process trains, one model after the other; none where `how` is none.

    Outside of `running` their forwards are the uncompiled ones.
    """

    def __init__(self, how: Compile) -> None:
        self.wanted = how == "blocks"
        self.refused = ""  # why nothing is compiled though it is wanted
        self._is_running = False
        self._forwards: dict[Forward, Forward] = {}
        self._news = CompilerNews()
        self.news()  # what was compiled before is not ours

    def take(self, model: nn.Module) -> None:
        """Have the repeated layers of a model run compiled code within `running`.

        Raises:
            UsageError: no repeated layers are found, or somebody else has changed how they are called.
        """
        if not self.wanted:
            return
        blocks = blocks_of(model)
        if not blocks:
            raise UsageError("compile=blocks: no repeated layers are found; give the model a method blocks()")
        stop_caching(model)  # each layer has another place in the cache, and so would be compiled by itself
        for block in blocks:
            forward: Any = block.forward
            if getattr(forward, "__self__", None) is not block:
                raise UsageError(f"compile=blocks: the forward of a {type(block).__name__} has been replaced; use none")
            # A bound method, as under activation checkpointing, and no wrapper: names stay what they are. It lies
            # within the layer's hooks, with which FSDP gathers parameters; these are not compiled.
            block.forward = MethodType(self._switched(forward.__func__), block)

    def take_loss(self, task: object) -> None:
        """Have a language model's loss run compiled code within `running`: one pass over the logits in place of many.

        The logits are the largest tensors of a step by far.
        """
        if self.wanted and isinstance(task, LanguageModeling):
            task.summed_loss = self._switched(task.summed_loss)

    def _switched(self, eager: Forward) -> Forward:
        if eager not in self._forwards:
            compiled = _compile(eager)

            # Of this name, so that a layer that is pickled comes back with the forward of its class.
            def forward(*args: Any, **named: Any) -> Any:
                return (compiled if self._is_running else eager)(*args, **named)

            self._forwards[eager] = forward
        return self._forwards[eager]

    @contextmanager
    def running(self, is_full: bool) -> Iterator[None]:
        """Have forwards and backwards within run compiled code, if they are of a full microbatch.

        Raises:
            TrainingError: a layer cannot be compiled.
        """
        # Each shape has to be compiled by itself. For the short microbatch that a step may end with, all would wait for
        # code that is hardly used.
        if not is_full or not self.wanted or self.refused:
            yield
            return
        self._is_running = True
        try:
            yield
        except Exception as error:
            if not is_compiler_failure(error):
                raise
            what = f"a layer cannot be compiled: {one_line(error)}; compile=none runs it as it is"
            raise TrainingError(what) from error
        finally:
            # Behind the backward, in which a checkpoint of the user's own runs a layer again.
            self._is_running = False

    def news(self) -> list[Event]:
        """Return what this process's compiler has done, since the last call, that is worth telling."""
        return self._news.events() if self.wanted else []

    def try_out(self, run: Callable[[], object]) -> None:
        """Have `run` compile whatever it needs, within `running`. If that fails nothing is compiled from now on."""
        try:
            with self.running(is_full=True):
                run()
        except torch.OutOfMemoryError:
            pass  # the first step meets it again, and knows what to do
        except Exception as error:
            # An error of the model's own comes again in the first step, which tells it as it is.
            cause = error.__cause__ or error
            self.refused = f"{type(cause).__name__}: {one_line(cause)}"


def probe(device: torch.device) -> None:
    """Compile and run a function of one line: it raises where there is no compiler for `device`."""
    compiled = torch.compile(_increment, dynamic=False)
    compiled(torch.ones(1, device=device))


def _increment(number: torch.Tensor) -> torch.Tensor:
    return number + 1


def _compile(forward: Forward) -> Forward:
    # Dropout is drawn as it is without compilation. So it makes no difference to the result which forwards are
    # compiled, nor that one worker has a compiler and another has none.
    options: dict[str, Any] = {"fallback_random": True}
    if torch.are_deterministic_algorithms_enabled():
        options["deterministic"] = True  # no choice of a kernel follows from a measured time
    return torch.compile(forward, dynamic=False, options=options)
