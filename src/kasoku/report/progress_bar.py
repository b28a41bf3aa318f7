"""The progress bar, and tables of results, drawn by rich."""

import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from kasoku.core import Clock, Wall

_LINE_S = 30.0  # between two lines outside a terminal


class Bar:
    """A progress line: epoch, images/s, loss, accuracy, time left. Outside a terminal, lines now and then.

    There, each evaluation has one, and one follows when there was none for 30 s.
    """

    def __init__(self, total_steps: int, epochs: float, *, quiet: bool = False, clock: Clock | None = None) -> None:
        self._console = Console(file=sys.stdout, highlight=False, quiet=quiet)
        self._epochs, self._clock = epochs, clock or Wall()
        text = "epoch {task.fields[epoch]} · {task.fields[rate]} images/s · loss {task.fields[loss]}"
        self._progress = Progress(
            TextColumn(text + " · accuracy {task.fields[accuracy]}"),
            BarColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            get_time=self._clock.now,
        )
        start: dict[str, Any] = {"epoch": "0", "rate": "-", "loss": "-", "accuracy": "-"}
        self._task = self._progress.add_task("train", total=total_steps, **start)
        self._progress.start()
        self._line_s = self._clock.now()  # when the last line was printed

    def step(self, step: int, epoch: float, *, loss: float, images_per_s: float) -> None:
        shown: dict[str, Any] = {"epoch": self._at(epoch), "rate": f"{images_per_s:,.0f}", "loss": f"{loss:.3f}"}
        self._progress.update(self._task, completed=step, **shown)
        left_s = self._progress.tasks[0].time_remaining
        if left_s and self._clock.now() - self._line_s >= _LINE_S:
            self._line(epoch, f"{timedelta(seconds=round(left_s))} left", loss=loss, images_per_s=images_per_s)

    def accuracy(self, epoch: float, top1: float, *, loss: float, images_per_s: float) -> None:
        """Reports the accuracy of an evaluation, from 0 to 1."""
        self._progress.update(self._task, accuracy=f"{top1:.2%}")
        self._line(epoch, f"accuracy {top1:.2%}", loss=loss, images_per_s=images_per_s)

    def _line(self, epoch: float, end: str, *, loss: float, images_per_s: float) -> None:
        self._line_s = self._clock.now()
        if not self._console.is_terminal:
            self.say(f"epoch {self._at(epoch)}  {images_per_s:,.0f} images/s  loss {loss:.3f}  {end}")

    def say(self, line: str) -> None:
        """Prints a line above the bar."""
        self._console.print(line, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Stops the bar and leaves its last state on the screen."""
        self._progress.stop()

    def _at(self, epoch: float) -> str:
        return f"{epoch:.1f}/{self._epochs:g}"


def print_table(title: str, rows: Mapping[str, str] | Sequence[Sequence[str]], head: Sequence[str] = ()) -> None:
    """Prints a table: of names and values, or of rows below a head, in which numbers are to the right."""
    columns = (Column(name, justify="right" if i else "left") for i, name in enumerate(map(escape, head)))
    table = Table(*columns, title=title, show_header=bool(head), title_justify="left")
    for row in rows.items() if isinstance(rows, Mapping) else rows:
        table.add_row(*map(escape, row))
    Console(highlight=False).print(table)
