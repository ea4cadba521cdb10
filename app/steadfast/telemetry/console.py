"""Console output of a command: event lines and a progress bar."""

import contextlib
import os
import threading
import time
from typing import IO

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from steadfast.run.events import Event, Finished, Log
from steadfast.telemetry.outcome import Summary, result
from steadfast.units import printable

_QUIET_S = 4.0  # silence after which the console names the current stage


class _Rich(RichConsole):
    def on_broken_pipe(self) -> None:
        """Stop all output when the reader of the pipe has gone.

        Rich's own implementation would end the process.
        """
        self.quiet = True
        # The interpreter flushes the stream at exit, which would raise the same error without this redirection.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


class Console:
    """Prints events as lines, with a progress bar on a terminal.

    On a terminal a log event moves the bar and prints no line, unless `verbose` is set.
    """

    def __init__(self, verbose: bool = False, file: IO[str] | None = None) -> None:
        self.verbose = verbose
        self._stage = threading.Timer(0.0, self.line)
        self._rich = _Rich(file=file, highlight=False)
        # Without a refresh thread only events move the bar. Other output (Ray's worker logs) appears above it.
        self._live = Live(console=self._rich, auto_refresh=False, transient=True)

    def stage(self, text: str, since_s: float | None = None) -> None:
        """Print `text` unless another line is printed within four seconds.

        The four seconds begin now, or at the Unix time `since_s`.
        """
        self._stage.cancel()
        passed_s = 0.0 if since_s is None else time.time() - since_s
        # A timer thread prints the text, because the calling thread may be busy with an import or wait for Ray.
        self._stage = threading.Timer(max(0.0, _QUIET_S - passed_s), self.line, (text,))
        self._stage.daemon = True
        self._stage.start()

    def show(self, event: Event) -> None:
        """Print the event's line, or move the bar."""
        # `finish` prints the result, because its summary has entries that only the command knows.
        if isinstance(event, Finished) or (event.detail and not self.verbose):
            return
        if isinstance(event, Log) and self._rich.is_terminal:
            self._move_bar(event)
            if not self.verbose:
                return
        self.line(event.verbose_line() if self.verbose else event.line())

    def _move_bar(self, event: Log) -> None:
        self._stage.cancel()
        # Rich would apply the soft wrap of `line` to the live bar as well, and cut off long figures.
        figures = Text(printable(event.line()), style="dim", no_wrap=False)
        bar = ProgressBar(event.total_steps, event.step)
        with contextlib.suppress(OSError):
            self._live.start()
            self._live.update(Group(figures, bar), refresh=True)

    def line(self, text: str) -> None:
        """Print a line, and cancel a pending `stage` text."""
        self._stage.cancel()
        # Neither a closed terminal nor a pipe without a reader (see `_Rich`) ends a run.
        with contextlib.suppress(OSError):
            # `Text` keeps "[rank 3]" from being read as markup. Soft wrap keeps a long line whole in a pipe.
            self._rich.print(Text(printable(text)), soft_wrap=True)

    def finish(self, summary: Summary) -> None:
        """Print the result of a run."""
        self.close()
        for text in result(summary):
            self.line(text)

    def close(self) -> None:
        """Remove the bar, and cancel a pending `stage` text."""
        self._stage.cancel()
        with contextlib.suppress(OSError):
            self._live.stop()
