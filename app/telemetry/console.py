"""What the driver shows: on a terminal a live bar with lines above it, elsewhere lines alone."""

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

from app.run.events import Event, Finished, Log
from app.telemetry.outcome import Summary, result
from app.units import printable

_QUIET_S = 4.0  # after which a person wants to know what is going on


class _Rich(RichConsole):
    def on_broken_pipe(self) -> None:
        """Show nothing any more once nobody reads the pipe. Rich itself would end the process here."""
        self.quiet = True
        # What the interpreter flushes at its end would raise the same error.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


class Console:
    """Shows events as they come. On a terminal a log event only moves the bar, unless `verbose`."""

    def __init__(self, verbose: bool = False, file: IO[str] | None = None) -> None:
        self.verbose = verbose
        self._stage = threading.Timer(0.0, self.line)
        self._rich = _Rich(file=file, highlight=False)
        # No refresh thread: events move it. What others print (Ray's worker logs) goes above the bar.
        self._live = Live(console=self._rich, auto_refresh=False, transient=True)

    def stage(self, text: str, since_s: float | None = None) -> None:
        """Say what is going on if nothing else is said for four seconds, from now or since a Unix time."""
        self._stage.cancel()
        passed_s = 0.0 if since_s is None else time.time() - since_s
        # A thread: this one may be busy with an import, or wait for Ray.
        self._stage = threading.Timer(max(0.0, _QUIET_S - passed_s), self.line, (text,))
        self._stage.daemon = True
        self._stage.start()

    def show(self, event: Event) -> None:
        # `finish` tells it, with what the driver alone knows.
        if isinstance(event, Finished) or (event.detail and not self.verbose):
            return
        if isinstance(event, Log) and self._rich.is_terminal:
            self._move_bar(event)
            if not self.verbose:
                return
        self.line(event.line(self.verbose))

    def _move_bar(self, event: Log) -> None:
        self._stage.cancel()
        figures = Text(printable(event.line()), style="dim", no_wrap=False)  # also while `line` prints above, unwrapped
        bar = ProgressBar(event.total_steps, event.step)
        with contextlib.suppress(OSError):
            self._live.start()
            self._live.update(Group(figures, bar), refresh=True)

    def line(self, text: str) -> None:
        self._stage.cancel()
        # A terminal that is closed does not end a run, nor does a pipe that nobody reads, see `_Rich`.
        with contextlib.suppress(OSError):
            # Text is not markup ("[rank 3]" is no style), and soft wrap leaves long lines whole in a pipe.
            self._rich.print(Text(printable(text)), soft_wrap=True)

    def finish(self, summary: Summary) -> None:
        """Print the result of a run."""
        self.close()
        for text in result(summary):
            self.line(text)

    def close(self) -> None:
        self._stage.cancel()
        with contextlib.suppress(OSError):
            self._live.stop()
