"""Handle Ctrl-C, SIGTERM and SIGHUP: one means finish the step, checkpoint and stop; a second one means stop now."""

import contextlib
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

EXIT_STOPPED = 3
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last one: the terminal is closed, or ssh is gone
_ABORT_S = 3.0
# A terminal and a launcher may both deliver one Ctrl-C; nobody presses it twice so fast.
_SAME_S = 0.5


class Interrupts:
    """A context in which the first of the signals calls `on_stop`; the second calls `on_abort` and ends the process.

    A SIGHUP that is ignored stays so, which is what `nohup` asks for. `on_abort` has three seconds. Only in the main
    thread: signals come to no other.

    Args:
        of_process: whether the process is this program's own. If not, a second signal raises KeyboardInterrupt.
    """

    def __init__(
        self,
        on_stop: Callable[[], None] = lambda: None,
        on_abort: Callable[[], None] = lambda: None,
        of_process: bool = True,
    ) -> None:
        self.on_stop = on_stop
        self.on_abort = on_abort
        self._of_process = of_process
        self._first_s = 0.0
        self._former: dict[int, Any] = {}

    @property
    def stopping(self) -> bool:
        return self._first_s > 0

    def check(self) -> None:
        """Raise KeyboardInterrupt if a stop has been requested; for code that has nothing to finish."""
        # The handler itself must not raise: it may run inside a callback of Ray, which swallows exceptions.
        if self.stopping:
            raise KeyboardInterrupt

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.getsignal(number) for number in _SIGNALS}
            for number, former in self._former.items():
                if number != signal.SIGHUP or former != signal.SIG_IGN:
                    signal.signal(number, self._handle)
        return self

    @contextlib.contextmanager
    def spared(self) -> Iterator[None]:
        """Have processes that are started within survive SIGHUP and SIGTERM; keep this object's handlers in place.

        A service manager sends SIGTERM to all processes of a service; this command decides when the others end.
        """
        # Processes inherit both signals as blocked. Threads that libraries (numpy) have started before do not block
        # them, and the signal then comes within the context; so a library's handler must not be installed there.
        if not self._former:
            yield
            return
        blocked = {signal.SIGTERM}
        if self._former[signal.SIGHUP] != signal.SIG_IGN:
            blocked.add(signal.SIGHUP)
        set_handler = signal.signal
        signal.signal = lambda number, handler: (  # type: ignore[assignment]
            signal.getsignal(number) if number in self._former else set_handler(number, handler)
        )
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            yield
        finally:
            signal.signal = set_handler
            for number in blocked:
                # Ray's C++ code sets a handler by sigaction, which Python does not see. After a SIGTERM that one prints
                # a stack and, three seconds later, aborts the process by SIGALRM.
                signal.signal(number, signal.getsignal(number))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
            if self.stopping:
                signal.alarm(0)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if number == signal.SIGHUP:
            _leave_terminal()
        if not self._first_s:
            self._first_s = now_s
            self.on_stop()
        elif now_s - self._first_s > _SAME_S:
            if not self._of_process:
                raise KeyboardInterrupt
            sys.stderr.write("stopped at once; the last checkpoint holds\n")
            # Not sys.exit: a collective or an RPC may hold the interpreter for as long as its peer is silent.
            threading.Timer(_ABORT_S, os._exit, (EXIT_STOPPED,)).start()
            self.on_abort()
            os._exit(EXIT_STOPPED)


def stop_by_signals() -> None:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt, as SIGINT does, until `Interrupts` takes them over.

    A SIGHUP that is ignored stays so.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.default_int_handler)


def outlive_sigterm() -> None:
    """Have SIGTERM do nothing to this process where it has inherited that from `Interrupts.spared`.

    It is blocked no more, because that would be inherited by all that user code starts here, and later ends by SIGTERM.
    """
    if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        signal.signal(signal.SIGTERM, lambda *_: None)
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
        unblock_sigterm()


def unblock_sigterm() -> None:
    """Let SIGTERM come to this thread, and to what it starts."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _leave_terminal() -> None:
    """Have nothing written to a terminal that is not there any more: each line would raise an error."""
    for number in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(number).st_mode) and not os.isatty(number):
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
