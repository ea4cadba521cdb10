"""What the driver shows: on a terminal a live bar with lines above it, elsewhere lines alone."""

from typing import IO

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from app.telemetry.narrate import Event, eta, figures, narrate, position, result


class Console:
    """Shows events as they come. On a terminal a log event only moves the bar, unless `verbose`."""

    def __init__(self, verbose: bool = False, file: IO[str] | None = None) -> None:
        self._verbose = verbose
        self._rich = RichConsole(file=file, highlight=False)
        self._live: Live | None = None

    def show(self, event: Event) -> None:
        kind = event["event"]
        if kind == "finished":
            return  # `finish` tells it, with what the driver alone knows
        if kind == "log" and self._rich.is_terminal:
            self._move_bar(event)
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
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _move_bar(self, event: Event) -> None:
        if self._live is None:
            # No refresh thread: events move it. What others print (Ray's worker logs) goes above the bar.
            self._live = Live(console=self._rich, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(_bar(event), refresh=True)


def _bar(event: Event) -> Group:
    """Two rows, because the figures and a bar do not fit into eighty columns together."""
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    row.add_row(position(event), ProgressBar(event["total_steps"], event["step"]), eta(event))
    return Group(row, Text(" | ".join(figures(event)), style="dim", no_wrap=True, overflow="ellipsis"))
