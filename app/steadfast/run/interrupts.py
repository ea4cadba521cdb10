"""Handle Ctrl-C, SIGTERM and SIGHUP, and the notices SIGUSR1 and SIGUSR2.

The first signal makes the run finish the step, write a checkpoint and stop. A second signal stops the run at once,
unless one of the two is a notice.
"""

import contextlib
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

EXIT_STOPPED = 3
_NOTICES = (signal.SIGUSR1, signal.SIGUSR2)  # schedulers send one some time before an allocation ends
# SIGHUP: the terminal closed or the ssh connection ended
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *_NOTICES)
_ABORT_S = 3.0
# A terminal and a launcher may both deliver the same Ctrl-C. A user does not press Ctrl-C twice within this time.
_SAME_S = 0.5
_requested = threading.Event()  # by a signal before `Interrupts`


class Interrupts:
    """Context that handles stop signals.

    The first signal calls `on_stop` with the signal and this process, in words. A second signal calls `on_abort`, which
    has three seconds, and ends the process.

    Args:
        of_process: whether the process is this program's own. If not, a second signal raises KeyboardInterrupt.
    """

    def __init__(
        self,
        on_stop: Callable[[str], None] = lambda _: None,
        on_abort: Callable[[], None] = lambda: None,
        of_process: bool = True,
    ) -> None:
        self.on_stop = on_stop
        self.on_abort = on_abort
        self.stopping = False
        self._of_process = of_process
        self._first_s = 0.0  # time of the first signal that is no notice
        self._former: dict[int, Any] = {}

    def check(self) -> None:
        """Raise KeyboardInterrupt if a stop has been requested.

        Code without unfinished work calls this function.
        """
        # The handler itself must not raise: it may run inside a callback of Ray, which swallows exceptions.
        if self.stopping:
            raise KeyboardInterrupt

    def __enter__(self) -> Self:
        # Python delivers signals to the main thread, and refuses handlers that another thread installs.
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.getsignal(number) for number in STOP_SIGNALS}
            for number, former in self._former.items():
                if not _stays_ignored(number, former):
                    signal.signal(number, self._handle)
            if self._of_process and stop_requested():
                self.stopping = True
                self._first_s = time.monotonic()
        return self

    @contextlib.contextmanager
    def spared(self) -> Iterator[None]:
        """Block all stop signals but SIGINT in processes started within the context.

        Service managers and Slurm send signals to all processes of a service or job step, but this command decides when
        its processes end. The handlers of this object stay in place.
        """
        # New processes inherit the blocked signals. Threads that libraries (numpy) started earlier do not block the
        # signals, so a signal may arrive within the context; therefore libraries must not install a handler there.
        if not self._former:
            yield
            return
        blocked = {number for number, former in self._former.items() if not _stays_ignored(number, former)}
        blocked.remove(signal.SIGINT)
        set_handler = signal.signal

        def set_other_handler(number: int, handler: Any) -> Any:
            if number in self._former:
                return signal.getsignal(number)
            return set_handler(number, handler)

        signal.signal = set_other_handler  # type: ignore[assignment]
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            yield
        finally:
            signal.signal = set_handler
            for number in blocked:
                # Ray's C++ code installs a handler by sigaction, which Python does not notice. After a SIGTERM Ray's
                # handler prints a stack and, three seconds later, aborts the process by SIGALRM.
                signal.signal(number, signal.getsignal(number))
            # A signal that arrived meanwhile is delivered now, so the handlers had to be in place before.
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
        if not self.stopping:
            self.stopping = True
            self.on_stop(f"{signal.Signals(number).name} to pid {os.getpid()} on {socket.gethostname()}")
        # A scheduler repeats a notice, and sends SIGTERM after it, while the checkpoint is being written.
        if number in _NOTICES:
            return
        if not self._first_s:
            self._first_s = now_s
        elif now_s - self._first_s > _SAME_S:
            if not self._of_process:
                raise KeyboardInterrupt
            sys.stderr.write("stopped at once; the last checkpoint holds\n")
            # os._exit replaces sys.exit, because a collective or an RPC may block the interpreter while its peer is
            # silent. The same may happen to `on_abort`, hence the timer.
            threading.Timer(_ABORT_S, os._exit, (EXIT_STOPPED,)).start()
            self.on_abort()
            os._exit(EXIT_STOPPED)


def stop_by_signals() -> None:
    """Make the stop signals raise KeyboardInterrupt.

    From then on `stop_requested` returns True. The handlers apply until `Interrupts` replaces them.
    """
    for number in STOP_SIGNALS:
        if not _stays_ignored(number, signal.getsignal(number)):
            signal.signal(number, _request_stop)


def _stays_ignored(number: int, former: Any) -> bool:
    # `nohup` ignores SIGHUP. A shell ignores SIGINT in a process that it starts in the background.
    return former == signal.SIG_IGN and number not in (signal.SIGINT, signal.SIGTERM)


def stop_requested() -> bool:
    """Return whether a signal has arrived before `Interrupts` handled signals."""
    return _requested.is_set()


def _request_stop(number: int, frame: FrameType | None) -> None:
    # The exception alone is not enough. It may arrive during an import in C code, as of numpy by torch, which discards
    # the exception and leaves a half imported module.
    _requested.set()
    raise KeyboardInterrupt


def outlive_sigterm() -> None:
    """Ignore SIGTERM if this process was started in `Interrupts.spared`."""
    # The process inherited SIGTERM as blocked. A handler that does nothing replaces the block: the user's subprocesses
    # would inherit the block, and then SIGTERM could not end the subprocesses.
    if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        signal.signal(signal.SIGTERM, lambda *_: None)
        # A new program begins without this handler, but a forked child that runs no new program keeps the handler.
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
        unblock_sigterm()


def unblock_sigterm() -> None:
    """Unblock SIGTERM in this thread and in processes it starts."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _leave_terminal() -> None:
    """Redirect output of a closed terminal to /dev/null.

    Otherwise each line of output would raise an error.
    """
    # A closed terminal is a character device that no longer answers as a terminal. Files and pipes are no such devices,
    # and keep the output.
    for number in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(number).st_mode) and not os.isatty(number):
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
