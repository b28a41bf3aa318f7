"""What a training writes as it goes: metrics (JSONL), MLPerf log lines, a progress bar; and tables of results."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from kasoku.core import Clock, InputError, Wall
from kasoku.core.files import write_error, write_text

_LINE_S = 30.0  # between two lines outside a terminal


class Log:
    """The logs of one run; each line is flushed at once. Without a folder, as on all ranks but the first, none.

    metrics.jsonl: one object a line with `step`, `epoch`, `time_s` and the values. mlperf.log: `:::MLLOG` lines.
    Resuming at a step drops later metrics; mlperf.log is continued.
    """

    def __init__(self, folder: Path | None, *, resume_step: int | None = None) -> None:
        self._files: dict[str, TextIO] = {}
        if folder is None:
            return
        path = folder / "metrics.jsonl"
        try:
            if resume_step is not None and path.exists():
                kept = [line for line in path.read_text(errors="replace").splitlines() if _step(line) <= resume_step]
                write_text(path, "".join(f"{line}\n" for line in kept))
            for name in ("metrics.jsonl", "mlperf.log"):
                self._files[name] = (folder / name).open("a", buffering=1)
        except OSError as error:
            raise InputError(f"{folder}: cannot write logs there ({error.strerror}): choose another --out") from error

    def metrics(self, step: int, epoch: float, values: dict[str, float]) -> None:
        """Records values at a step; times are seconds since 1970."""
        line = {"step": step, "epoch": round(epoch, 4), "time_s": round(time.time(), 3), **values}
        self._write("metrics.jsonl", json.dumps(line))

    def mlperf(self, key: str, value: Any = None, *, event: str = "POINT_IN_TIME", **metadata: Any) -> None:
        """Writes a line in mlperf-logging's format; event is INTERVAL_START, INTERVAL_END or POINT_IN_TIME."""
        record = {"namespace": "", "time_ms": int(time.time() * 1000), "event_type": event}
        record |= {"key": key, "value": value, "metadata": metadata}
        self._write("mlperf.log", f":::MLLOG {json.dumps(record)}")

    def close(self) -> None:
        """Flushes and closes the files."""
        for file in self._files.values():
            with suppress(OSError):  # a full disk was reported when the line was written
                file.close()

    def _write(self, name: str, line: str) -> None:
        if file := self._files.get(name):
            try:
                file.write(f"{line}\n")
            except OSError as error:
                raise write_error(Path(file.name), error) from error


def _step(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 1 << 62  # a half-written last line, or damage


class Bar:
    """A progress line: epoch, images/s, loss, accuracy, time left. Outside a terminal, lines now and then.

    There, each evaluation has one, and one follows when there was none for 30 s.
    """

    def __init__(self, total_steps: int, epochs: float, *, quiet: bool = False, clock: Clock | None = None) -> None:
        self._console = Console(file=sys.stdout, highlight=False, quiet=quiet)
        self._epochs, self._clock = epochs, clock or Wall()
        text = "epoch {task.fields[epoch]} · {task.fields[rate]} images/s · loss {task.fields[loss]}"
        columns = (TextColumn(text + " · accuracy {task.fields[accuracy]}"), BarColumn(), TimeRemainingColumn())
        hidden = not self._console.is_terminal
        self._progress = Progress(*columns, console=self._console, disable=hidden, get_time=self._clock.now)
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
        with suppress(SystemExit):  # rich's answer to a pipe that was closed; it is silent from then on
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
