"""Compilations by torch.compile, which interrupt a phase at any moment and may take minutes."""

import functools
import weakref
from typing import Any

from app.world.progress import Progress

_progress: weakref.WeakSet[Progress] = weakref.WeakSet()  # of this process: one


def follow_compilations(progress: Progress) -> None:
    """Mark each compilation in `progress`, from now on."""
    _register()
    _progress.add(progress)


@functools.cache
def _register() -> None:
    # Imported here, where building an optimizer has imported it already: by itself it takes a second.
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(_begin)
    callback_handler.register_end_callback(_end)


# Called on the thread that compiles: the training thread, or autograd's while the training thread waits for it.
def _begin(_: Any) -> None:
    for progress in _progress:
        progress.compiling()


def _end(_: Any) -> None:
    for progress in _progress:
        progress.compiled()
