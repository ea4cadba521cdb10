"""What the driver shows: on a terminal a live bar with lines above it, elsewhere lines alone."""

from typing import IO

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from app.telemetry.narrate import Event, narrate, result


class Console:
    """Shows events as they come. On a terminal a log event only moves the bar, unless `verbose`."""

    def __init__(self, verbose: bool = False, file: IO[str] | None = None) -> None:
        self._verbose = verbose
        self._rich = RichConsole(file=file, highlight=False)
        # No refresh thread: events move it. What others print (Ray's worker logs) goes above the bar.
        self._live = Live(console=self._rich, auto_refresh=False, transient=True)

    def show(self, event: Event) -> None:
        kind = event["event"]
        if kind == "finished":
            return  # `finish` tells it, with what the driver alone knows
        if kind == "log" and self._rich.is_terminal:
            self._live.start()
            figures = Text(narrate(event), style="dim", no_wrap=False)  # also while `line` prints above, unwrapped
            bar = ProgressBar(event["total_steps"], event["step"])
            self._live.update(Group(figures, bar), refresh=True)
        if kind != "log" or self._verbose or not self._rich.is_terminal:
            self.line(narrate(event, self._verbose))

    def line(self, text: str) -> None:
        # Text is not markup ("[rank 3]" is no style), and soft wrap leaves long lines whole in a pipe.
        self._rich.print(Text(text), soft_wrap=True)

    def finish(self, summary: Event) -> None:
        """Print the result: summary.json's keys, also `sample` (text) and `tensorboard` (directory)."""
        self.close()
        for text in result(summary):
            self.line(text)

    def close(self) -> None:
        self._live.stop()
