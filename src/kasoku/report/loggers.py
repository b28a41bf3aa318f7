"""The logs of a training: metrics as JSONL, and MLPerf log lines."""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from kasoku.core import InputError
from kasoku.core.files import write_error, write_text


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
                lines = path.read_text(errors="replace").splitlines()
                kept = [line for line in lines if _step(line) <= resume_step]
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
