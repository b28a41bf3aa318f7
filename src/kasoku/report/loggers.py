"""The logs of a training: metrics as JSONL, TensorBoard events, MLPerf log lines."""

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from kasoku.core import InputError
from kasoku.core.files import write_error, write_text


class Log:
    """The logs of one run; each line is flushed at once. Without a folder, as on all ranks but the first, none.

    metrics.jsonl: one object a line with `step`, `epoch`, `time_s` and the values. tensorboard/: the same as scalars.
    mlperf.log: `:::MLLOG` lines. Resuming at a step drops later metrics; the other two files are continued.
    """

    def __init__(self, folder: Path | None, *, resume_step: int | None = None) -> None:
        self._folder = folder
        if folder is None:
            return
        path = folder / "metrics.jsonl"
        try:
            if resume_step is not None and path.exists():
                lines = path.read_text(errors="replace").splitlines()
                kept = [line for line in lines if _step(line) <= resume_step]
                write_text(path, "".join(f"{line}\n" for line in kept))
            self._lines = path.open("a", buffering=1)
            self._mlperf = (folder / "mlperf.log").open("a", buffering=1)
            (folder / "tensorboard").mkdir(exist_ok=True)
            name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
            self._events = RecordWriter((folder / "tensorboard" / name).open("ab"))
            self._add_event(Event(wall_time=time.time(), file_version="brain.Event:2"))
        except OSError as error:
            raise InputError(f"{folder}: cannot write logs there ({error.strerror}): choose another --out") from error

    def metrics(self, step: int, epoch: float, values: dict[str, float]) -> None:
        """Records values at a step; times are seconds since 1970."""
        if self._folder is None:
            return
        now = time.time()
        line = json.dumps({"step": step, "epoch": round(epoch, 4), "time_s": round(now, 3), **values})
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        try:
            self._lines.write(line + "\n")
            self._add_event(Event(wall_time=now, step=step, summary=Summary(value=scalars)))
        except OSError as error:
            raise write_error(self._folder / "metrics.jsonl", error) from error

    def _add_event(self, event: Event) -> None:
        self._events.write(event.SerializeToString())
        self._events.flush()

    def mlperf(self, key: str, value: Any = None, *, event: str = "POINT_IN_TIME", **metadata: Any) -> None:
        """Writes a line in mlperf-logging's format; event is INTERVAL_START, INTERVAL_END or POINT_IN_TIME."""
        if self._folder is None:
            return
        record = {"namespace": "", "time_ms": int(time.time() * 1000), "event_type": event}
        record |= {"key": key, "value": value, "metadata": metadata}
        try:
            self._mlperf.write(f":::MLLOG {json.dumps(record)}\n")
        except OSError as error:
            raise write_error(self._folder / "mlperf.log", error) from error

    def close(self) -> None:
        """Flushes and closes the files."""
        if self._folder:
            for part in (self._lines, self._mlperf, self._events):
                with suppress(OSError):  # a full disk was reported when the line was written
                    part.close()


def _step(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 1 << 62  # a half-written last line, or damage
