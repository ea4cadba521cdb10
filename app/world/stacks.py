"""Stacks of all threads of this process as text."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_USUAL_S = sys.getswitchinterval()
_EXCLUSIVE_S = 0.25  # a hundred times the time of reading the frames; a busy thread may delay it by as much
_YIELD_S = 0.001


def stacks(first: int) -> str:
    """Return the calls of all threads but the current one, innermost first.

    Args:
        first: identifier of the thread that comes first.
    """
    calls: dict[int, list[str]] = {}
    # The frames of a running thread may be freed during the walk, so no other thread may run. faulthandler stops all
    # threads too, but it crashes on threads that a library has not fully attached yet.
    with _exclusive():
        for thread, frame in sys._current_frames().items():
            if thread != threading.get_ident():
                calls[thread] = _calls(frame)

    names = {thread.ident: thread.name for thread in threading.enumerate()}
    blocks = []
    for thread in sorted(calls, key=lambda thread: (thread != first, thread)):
        name = names.get(thread, f"Thread 0x{thread:016x}")
        blocks.append("\n".join([f"{name} (most recent call first):", *calls[thread]]))
    return "\n\n".join(blocks)


def _calls(frame: FrameType | None) -> list[str]:
    lines = []
    while frame is not None:
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno or 0} in {frame.f_code.co_name}')
        frame = frame.f_back
    return lines


@contextmanager
def _exclusive() -> Iterator[None]:
    # A thread requests the GIL after one switch interval. With a longer interval, one sleep hands the GIL over, and the
    # next turn of this thread lasts about that long.
    sys.setswitchinterval(_EXCLUSIVE_S)
    time.sleep(_YIELD_S)
    try:
        yield
    finally:
        sys.setswitchinterval(_USUAL_S)
