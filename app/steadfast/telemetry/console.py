"""Console output of a command: event lines and a progress bar."""

import contextlib
import os
import threading
import time
from typing import IO

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from steadfast.run.events import AttemptStarted, Event, Failure, Finished, Log, Output, Validation
from steadfast.telemetry.outcome import Summary, result
from steadfast.units import duration, printable, size

_QUIET_S = 4.0  # silence in a pipe after which the console names the current stage
_TICK_S = 1.0  # time between two updates of the seconds of a stage on a terminal
_HELD_S = 2.0  # time for which an event waits for the event that completes its sentence
_BAR_WIDTH = 20


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
    """Prints events as lines, with a short progress bar below them on a terminal."""

    def __init__(self, verbose: bool = False, file: IO[str] | None = None) -> None:
        self.verbose = verbose
        self._lock = threading.RLock()  # timers print too
        self._stage = threading.Event()  # set once the current stage is over
        self._held: Event | None = None  # a failure or a validation, for at most `_HELD_S`
        self._release = threading.Timer(0.0, self._flush)
        self._rich = _Rich(file=file, highlight=False)
        if self._rich.is_jupyter:
            # Rich would display each line as an HTML block, and JupyterLab hides all but the first 50 blocks of a cell.
            # Without these blocks Rich would take the cell for a terminal, because ipykernel sets FORCE_COLOR.
            self._rich = _Rich(file=file, highlight=False, force_jupyter=False, force_terminal=False)
        self._live: Live | None = None  # the bar or the stage on a terminal

    def stage(self, text: str, since_s: float | None = None) -> None:
        """Show what the command waits for, until another line is printed.

        A terminal shows the seconds since now, or since the Unix time `since_s`. A pipe gets `text` as a line once
        these seconds are four.
        """
        self._end_stage()
        over = self._stage = threading.Event()
        began_s = since_s or time.time()
        # A thread shows the stage, because the calling thread may be busy with an import or wait for Ray.
        follow = self._count_seconds if self._rich.is_terminal else self._name_stage
        threading.Thread(target=follow, args=(text, began_s, over), daemon=True, name="stage").start()

    def _count_seconds(self, text: str, began_s: float, over: threading.Event) -> None:
        while not over.wait(_TICK_S):
            with self._lock:
                if not over.is_set():
                    self._show_below(Text(f"{printable(text)} {time.time() - began_s:.0f} s", style="dim"))

    def _name_stage(self, text: str, began_s: float, over: threading.Event) -> None:
        if over.wait(max(0.0, began_s + _QUIET_S - time.time())):
            return
        with self._lock:
            if not over.is_set():
                self.line(text)

    def _end_stage(self) -> None:
        with self._lock:
            if not self._stage.is_set():
                self._stage.set()
                self._stop_live()

    def show(self, event: Event) -> None:
        """Print the event's line, and move the bar."""
        # `finish` prints the result, because its summary has entries that only the command knows.
        if isinstance(event, Finished) or (event.detail and not self.verbose):
            return
        if isinstance(event, Output) and self.verbose:
            return  # Ray itself shows the output of its workers
        with self._lock:
            match event:
                case Log():
                    self._show_log(event)
                case AttemptStarted(interruption="failure") if isinstance(self._held, Failure) and not self.verbose:
                    held, self._held = self._held, None
                    self.line(f"{held.line()}; {event.line()}")
                case Failure() | Validation() if not self.verbose:
                    self._hold(event)
                case _:
                    self.line(self._text(event))

    def _show_log(self, log: Log) -> None:
        # On a device a step's figures are read one step late, so the validation of a step comes before its figures.
        after = None
        if isinstance(self._held, Validation) and log.step <= self._held.step:
            after, self._held = self._held, None
        self.line(self._text(log))
        if self._rich.is_terminal:
            self._move_bar(log)
        if after is not None:
            self.line(after.line())

    def _hold(self, event: Event) -> None:
        self._flush()
        self._end_stage()
        self._held = event
        self._release = threading.Timer(_HELD_S, self._flush)
        self._release.daemon = True
        self._release.start()

    def _flush(self) -> None:
        """Print the event that waits for another one."""
        with self._lock:
            self._release.cancel()
            held, self._held = self._held, None
            if held is not None:
                self.line(held.line())

    def _text(self, event: Event) -> str:
        return event.verbose_line() if self.verbose else event.line()

    def _move_bar(self, log: Log) -> None:
        row = Table.grid(padding=(0, 1))
        figures = f"{log.step / max(1, log.total_steps):.0%}  {size(log.memory_bytes)}  eta {duration(log.eta_s)}"
        row.add_row(ProgressBar(log.total_steps, log.step, width=_BAR_WIDTH), Text(figures, style="dim"))
        self._show_below(row)

    def _show_below(self, content: RenderableType) -> None:
        with contextlib.suppress(OSError):
            if self._live is None:
                # Without a refresh thread only events and stages move the bar. Other output appears above it.
                self._live = Live(console=self._rich, auto_refresh=False, transient=True)
                self._live.start()
            self._live.update(content, refresh=True)

    def line(self, text: str) -> None:
        """Print a line, and end the current stage."""
        with self._lock:
            self._flush()
            self._end_stage()
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
        """Print an event that waits, and remove the bar."""
        with self._lock:
            self._flush()
            self._end_stage()
            self._stop_live()

    def _stop_live(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(OSError):
                live.stop()
