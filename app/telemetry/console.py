"""What the driver shows: on a terminal a live bar with lines above it, elsewhere lines alone."""

from typing import IO

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from app.run.events import Event, Finished, Log
from app.telemetry.outcome import Summary, result


class Console:
    """Shows events as they come. On a terminal a log event only moves the bar, unless `verbose`."""

    def __init__(self, verbose: bool = False, file: IO[str] | None = None) -> None:
        self._verbose = verbose
        self._rich = RichConsole(file=file, highlight=False)
        # No refresh thread: events move it. What others print (Ray's worker logs) goes above the bar.
        self._live = Live(console=self._rich, auto_refresh=False, transient=True)

    def show(self, event: Event) -> None:
        # `finish` tells it, with what the driver alone knows.
        if isinstance(event, Finished):
            return
        if isinstance(event, Log) and self._rich.is_terminal:
            self._move_bar(event)
            if not self._verbose:
                return
        self.line(event.line(self._verbose))

    def _move_bar(self, event: Log) -> None:
        self._live.start()
        figures = Text(event.line(), style="dim", no_wrap=False)  # also while `line` prints above, unwrapped
        bar = ProgressBar(event.total_steps, event.step)
        self._live.update(Group(figures, bar), refresh=True)

    def line(self, text: str) -> None:
        # Text is not markup ("[rank 3]" is no style), and soft wrap leaves long lines whole in a pipe.
        self._rich.print(Text(text), soft_wrap=True)

    def finish(self, summary: Summary) -> None:
        """Print the result of a run."""
        self.close()
        for text in result(summary):
            self.line(text)

    def close(self) -> None:
        self._live.stop()
