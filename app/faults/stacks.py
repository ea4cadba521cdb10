"""What every thread of this process is doing, asked by one of them."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_USUAL_S = sys.getswitchinterval()
_ALONE_S = 0.25  # a hundred times what it takes; and how long a busy thread may keep it waiting
_PAUSE_S = 0.001  # in which another has its turn


def stacks(first: int) -> str:
    """Innermost call first, without the thread that asks.

    Nobody else runs meanwhile: the frames of a thread that does may be freed under who walks them. faulthandler would
    hold everybody still too, but reads threads that a library has not quite attached yet.

    Args:
        first: the thread that comes first of all.
    """
    with _alone():
        frames = sys._current_frames()
        calls = {thread: [*_calls(frames[thread])] for thread in frames.keys() - {threading.get_ident()}}
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    blocks = []
    for thread in sorted(calls, key=lambda thread: (thread != first, thread)):
        lines = [f'  File "{file}", line {line} in {name}' for file, line, name in calls[thread]]
        heading = f"{names.get(thread, f'Thread 0x{thread:016x}')} (most recent call first):"
        blocks.append("\n".join([heading, *lines]))
    return "\n\n".join(blocks)


def _calls(frame: FrameType | None) -> Iterator[tuple[str, int, str]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name
        frame = frame.f_back


@contextmanager
def _alone() -> Iterator[None]:
    """Who wants to run asks for its turn once it has waited for the interval, and waits anew when another's turn has
    come before. So whoever's turn has just come has that long for itself."""
    sys.setswitchinterval(_ALONE_S)
    time.sleep(_PAUSE_S)
    try:
        yield
    finally:
        sys.setswitchinterval(_USUAL_S)
