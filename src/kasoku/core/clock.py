"""Time: `Wall` for real runs; simulations have a virtual clock with the same method; `Stopwatch` for a GPU's time."""

import os
import time
from pathlib import Path
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """The time of a run, in seconds."""

    def now(self) -> float:
        """Seconds on this clock; only differences mean anything."""


class Wall:
    """The real clock (time.perf_counter)."""

    def now(self) -> float:
        return time.perf_counter()


class Stopwatch:
    """Moments on the stream of a GPU, or on the clock of the host."""

    def __init__(self, clock: Clock, device: torch.device) -> None:
        self.clock, self.device, self.cuda = clock, device, device.type == "cuda"

    def moment(self) -> Any:
        """Now, on the stream of CUDA: the host need not wait."""
        if not self.cuda:
            return self.synchronize()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: Any, stop: Any) -> float:
        return float(start.elapsed_time(stop) / 1e3 if self.cuda else stop - start)

    def synchronize(self) -> float:
        """Waits for the device; the host's time then."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()
        return self.clock.now()


def process_start() -> float:
    """The moment this process started, on the scale of `Wall` (Linux: to 10 ms; elsewhere: the first call)."""
    now = time.perf_counter()
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc_pid_stat(5), counted from boot
        return now - (time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
    except (OSError, ValueError, IndexError, AttributeError):
        return now
