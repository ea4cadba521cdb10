"""Compilations by torch.compile, which interrupt a phase and may take minutes."""

import functools
import traceback
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from steadfast.run.events import Notice
from steadfast.world.progress import Progress

_progress: weakref.WeakSet[Progress] = weakref.WeakSet()  # of this process, which has only one


def follow_compilations(progress: Progress) -> None:
    """Mark each later compilation in `progress`."""
    _register()
    _progress.add(progress)


@functools.cache
def _register() -> None:
    # Imported here, after building an optimizer has imported the module: the import takes a second.
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(_begin)
    callback_handler.register_end_callback(_end)


# Called on the thread that compiles: the training thread, or autograd's while the training thread waits.
def _begin(_: Any) -> None:
    for progress in _progress:
        progress.compiling()


def _end(_: Any) -> None:
    for progress in _progress:
        progress.compiled()


class CompilerNews:
    """Costly actions of this process's compiler that were not reported yet."""

    def __init__(self) -> None:
        self._last_us = 0  # start of the last compilation that was examined
        self._told: set[tuple[str, str]] = set()

    def events(self) -> list[Notice]:
        """Return new graph breaks and recompilations since the last call."""
        return [*self._new_breaks(), *self._recompiled()]

    def _new_breaks(self) -> list[Notice]:
        from torch._dynamo.utils import graph_break_reasons

        new: list[Notice] = []
        # Reading torch's list does not empty it, so breaks that are already told are in it again.
        for each in graph_break_reasons:
            place, reason = found = (_place(each.user_stack), one_line(each.reason))
            if found not in self._told:
                self._told.add(found)
                where = f", because of {place}" if place else ""
                text = f"a layer is compiled in parts, which is slower{where}: {reason}"
                new.append(Notice(event="graph_break", text=text, place=place, reason=reason))
        return new

    def _recompiled(self) -> list[Notice]:
        from torch._dynamo.utils import get_compilation_metrics

        found: list[Notice] = []
        last_us = self._last_us
        for each in get_compilation_metrics():  # the last 64, forwards and backwards
            began_us = each.start_time_us or 0
            self._last_us = max(self._last_us, began_us)
            if began_us > last_us and each.recompile_reason:
                # "0/0: tensor 'x' size mismatch at index 0. expected 4, actual 1  # the line of code"
                reason = one_line(each.recompile_reason).partition(": ")[2].partition("  #")[0]
                seconds = round((each.duration_us or 0) / 1e6, 1)
                function = each.co_name or ""
                text = f"{function} was compiled again in {seconds} s: {reason}"
                notice = Notice(event="recompiled", text=text, function=function, seconds=seconds, reason=reason)
                found.append(notice)
        return found


def _place(stack: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost line of a stack outside of PyTorch, or ""."""
    library = str(Path(torch.__file__).parent)
    for frame in reversed(stack):
        if not frame.filename.startswith(library):
            return f"{frame.filename}:{frame.lineno}"
    return ""


def is_compiler_failure(error: BaseException) -> bool:
    """Return whether an error comes from torch.compile itself."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def one_line(told: object) -> str:
    """Return the first line of a compiler's message, without advice and stacks."""
    lines = str(told).strip().splitlines() or [""]
    # A first line such as "backend='inductor' raised:" needs the second one.
    if lines[0].endswith(":"):
        return " ".join(lines[:2])
    return lines[0]
