"""Time: `Wall` for real runs; simulations have a virtual clock with the same method."""

import os
import time
from pathlib import Path
from typing import Protocol


class Clock(Protocol):
    """The time of a run, in seconds."""

    def now(self) -> float:
        """Seconds on this clock; only differences mean anything."""


class Wall:
    """The real clock (time.perf_counter)."""

    def now(self) -> float:
        return time.perf_counter()


def process_start() -> float:
    """The moment this process started, on the scale of `Wall` (Linux: to 10 ms; elsewhere: the first call)."""
    now = time.perf_counter()
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc_pid_stat(5), counted from boot
        return now - (time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
    except (OSError, ValueError, IndexError, AttributeError):
        return now
