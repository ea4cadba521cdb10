"""Compilation of repeated layers and a loss by torch.compile, for training only.

Only one shape of inputs is compiled. The functions that layers share are compiled, not the layers. So one compilation
serves all layers of a class, and the models of later attempts, because torch finds compiled code by the function.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from steadfast.config import Compile
from steadfast.errors import TrainingError, UsageError
from steadfast.parallel.blocks import blocks_of, stop_caching
from steadfast.run.events import Notice
from steadfast.tasks import LanguageModeling
from steadfast.world.compilation import CompilerNews, is_compiler_failure, one_line

Forward = Callable[..., Any]  # forward of a layer, which is its first argument


class CompiledBlocks:
    """Compiled layers of the models that this process trains in turn.

    With `how` "none" no layer is compiled. Outside of `running` the layers run uncompiled.
    """

    def __init__(self, how: Compile) -> None:
        self.wanted = how == "blocks"
        self.refused = ""  # why nothing is compiled although it is wanted
        self._is_running = False
        self._forwards: dict[Forward, Forward] = {}
        self._news = CompilerNews()
        self.news()  # discards compilations from before this object

    def take(self, model: nn.Module) -> None:
        """Prepare a model's repeated layers to run compiled code within `running`.

        Raises:
            UsageError: no repeated layers are found, or other code has replaced a layer's forward.
        """
        if not self.wanted:
            return
        blocks = blocks_of(model)
        if not blocks:
            raise UsageError("compile=blocks: no repeated layers are found; give the model a method blocks()")
        # Each layer's cache index would otherwise need a compilation of its own.
        stop_caching(model)
        for block in blocks:
            forward: Any = block.forward
            if getattr(forward, "__self__", None) is not block:
                raise UsageError(f"compile=blocks: the forward of a {type(block).__name__} has been replaced; use none")
            # A bound method instead of a wrapper keeps the parameters' names. The layer's hooks, with which FSDP
            # gathers parameters, run outside of it and are not compiled.
            block.forward = MethodType(self._switched(forward.__func__), block)

    def take_loss(self, task: object) -> None:
        """Compile a language model's loss, for use within `running`."""
        # The logits are by far the largest tensors of a step, and compiled code passes over them once.
        if self.wanted and isinstance(task, LanguageModeling):
            task.summed_loss = self._switched(task.summed_loss)

    def _switched(self, eager: Forward) -> Forward:
        if eager not in self._forwards:
            compiled = _compile(eager)

            # The name is that of the class's method, so that an unpickled layer has the forward of its class.
            def forward(*args: Any, **named: Any) -> Any:
                if self._is_running:
                    return compiled(*args, **named)
                return eager(*args, **named)

            self._forwards[eager] = forward
        return self._forwards[eager]

    @contextmanager
    def running(self, is_full: bool) -> Iterator[None]:
        """Run compiled code within the context, for a full microbatch.

        Raises:
            TrainingError: a layer cannot be compiled.
        """
        # Each shape needs a compilation. For the short microbatch at the end of some steps, all ranks would wait for
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
            # Reset after the backward, in which the user's own activation checkpointing runs a layer again.
            self._is_running = False

    def news(self) -> list[Notice]:
        """Return the compiler's notable events since the last call."""
        return self._news.events() if self.wanted else []

    def try_out(self, run: Callable[[], object]) -> None:
        """Compile by calling `run`; after a failure, disable compilation."""
        try:
            with self.running(is_full=True):
                run()
        except torch.OutOfMemoryError:
            # The first step meets the same error, and handles it by smaller forwards.
            pass
        except Exception as error:
            # An error of the model itself occurs again in the first step, which reports it unchanged.
            cause = error.__cause__ or error
            self.refused = f"{type(cause).__name__}: {one_line(cause)}"


def probe(device: torch.device) -> None:
    """Compile and run a tiny function; raises if `device` has no compiler."""
    compiled = torch.compile(_increment, dynamic=False)
    compiled(torch.ones(1, device=device))


def _increment(number: torch.Tensor) -> torch.Tensor:
    return number + 1


def _compile(forward: Forward) -> Forward:
    # Random numbers are drawn as without compilation. So results do not depend on which forwards are compiled, or on
    # which workers have a compiler.
    options: dict[str, Any] = {"fallback_random": True}
    if torch.are_deterministic_algorithms_enabled():
        options["deterministic"] = True  # kernels are not chosen by measured times
    return torch.compile(forward, dynamic=False, options=options)
