"""Write down what every thread of this process is doing."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_USUAL_S = sys.getswitchinterval()
_EXCLUSIVE_S = 0.25  # a hundred times what reading the frames takes; and how long a busy thread may delay it
_YIELD_S = 0.001


def stacks(first: int) -> str:
    """Return the calls of all threads but the current one, the innermost first.

    Args:
        first: identifier of the thread that comes first.
    """
    calls: dict[int, list[str]] = {}
    # The frames of a running thread may be freed while they are walked, so no other thread runs meanwhile. faulthandler
    # would stop all threads as well, but it also reads those that a library has not quite attached yet, and crashes.
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
    # A thread requests the GIL after one switch interval. With a longer interval, sleeping once hands the GIL over, and
    # the turn that follows is this thread's own for about that long.
    sys.setswitchinterval(_EXCLUSIVE_S)
    time.sleep(_YIELD_S)
    try:
        yield
    finally:
        sys.setswitchinterval(_USUAL_S)
