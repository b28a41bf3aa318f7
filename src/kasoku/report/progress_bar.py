"""The progress bar, and tables of results, drawn by rich."""

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


class Bar:
    """A progress line: epoch, images/s, loss, accuracy, time left. Outside a terminal, a line for each evaluation."""

    def __init__(self, total_steps: int, epochs: float, *, quiet: bool = False) -> None:
        self._console = Console(file=sys.stdout, highlight=False, quiet=quiet)
        self._epochs = epochs
        self._accuracy = "-"
        text = "epoch {task.fields[epoch]} · {task.fields[rate]} images/s · loss {task.fields[loss]}"
        self._progress = Progress(
            TextColumn(text + " · accuracy {task.fields[accuracy]}"),
            BarColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        start: dict[str, Any] = {"epoch": "0", "rate": "-", "loss": "-", "accuracy": "-"}
        self._task = self._progress.add_task("train", total=total_steps, **start)
        self._progress.start()

    def step(self, step: int, epoch: float, *, loss: float, images_per_s: float) -> None:
        shown: dict[str, Any] = {"epoch": self._at(epoch), "rate": f"{images_per_s:,.0f}", "loss": f"{loss:.3f}"}
        self._progress.update(self._task, completed=step, accuracy=self._accuracy, **shown)

    def accuracy(self, epoch: float, top1: float, *, loss: float, images_per_s: float) -> None:
        """Reports the accuracy of an evaluation, from 0 to 1."""
        self._accuracy = f"{top1:.2%}"
        if not self._console.is_terminal:
            self.say(f"epoch {self._at(epoch)}  {images_per_s:,.0f} images/s  loss {loss:.3f}  accuracy {top1:.2%}")

    def say(self, line: str) -> None:
        """Prints a line above the bar."""
        self._console.print(line, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Stops the bar and leaves its last state on the screen."""
        self._progress.stop()

    def _at(self, epoch: float) -> str:
        return f"{epoch:.1f}/{self._epochs:g}"


def print_table(title: str, rows: Mapping[str, str]) -> None:
    """Prints a table of two columns."""
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in rows.items():
        table.add_row(name, escape(value))
    Console(highlight=False).print(table)
