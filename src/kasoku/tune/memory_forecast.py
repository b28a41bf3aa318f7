"""Predicts the memory that a batch size needs from the peaks of smaller sizes, before it is tried."""

from __future__ import annotations

from pathlib import Path

import torch

from kasoku.core.hardware import resident_bytes
from kasoku.distributed.environment import ranks_on_host

_SHARE = 0.9  # of what is free, that may be taken: the rest is for others, and for what a line does not tell
_SAID = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "cudnn_status_alloc_failed",
    "cudnn_status_not_supported",
    "cublas_status_alloc_failed",
)
_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def forecast(peaks: list[tuple[int, int]], batch: int) -> int | None:
    """Bytes at the peak of a step of `batch` images, by a line through the last two of (batch, bytes); None: unknown.

    The sizes rise; the line never falls.
    """
    if len(peaks) < 2:
        return None
    (low, low_bytes), (high, high_bytes) = peaks[-2:]
    an_image = max(0.0, (high_bytes - low_bytes) / (high - low))
    return round(high_bytes + an_image * (batch - high))


class MemoryForecast:
    """The peaks of the sizes tried on one device.

    On CUDA what torch allocates at the peak; on a CPU the process's resident size after forward, where all activations
    are there.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peaks: list[tuple[int, int]] = []  # of sizes that rise
        self._seen = 0

    def begin(self) -> None:
        """A size is about to be tried."""
        self._seen = 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def look(self) -> None:
        """Between forward and backward."""
        if self.device.type == "cpu":
            self._seen = max(self._seen, resident_bytes())

    def note(self, batch: int) -> None:
        """The size worked."""
        if self.device.type == "cuda":
            self._seen = torch.cuda.max_memory_allocated(self.device)
        if self._seen and (not self.peaks or batch > self.peaks[-1][0]):
            self.peaks.append((batch, self._seen))

    def fits(self, batch: int) -> bool:
        """False where the size is foreseen not to fit; what is not known may be tried."""
        wanted = forecast(self.peaks, batch)
        if wanted is None or batch <= self.peaks[-1][0]:
            return True
        if self.device.type == "cuda":
            free_bytes, _ = torch.cuda.mem_get_info(self.device)
            now = torch.cuda.memory_allocated(self.device)
            unused = torch.cuda.memory_reserved(self.device) - now
            return wanted - now <= _SHARE * (free_bytes + unused)
        free, sharing = available_bytes(), ranks_on_host() or 1  # ranks that grow alike
        return free is None or sharing * (wanted - resident_bytes()) <= _SHARE * free


def available_bytes(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int | None:
    """What more may be taken without swapping, on this machine and in this container; None where nothing says it.

    Ref: proc_meminfo(5), MemAvailable; the kernel's cgroup-v2.rst, memory.max and memory.current.
    """
    free: list[int] = []
    try:
        lines = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines() if ":" in line)
        free.append(int(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, ValueError, KeyError, IndexError):
        pass
    try:
        most = (cgroup / "memory.max").read_text().strip()
        if most != "max":
            free.append(max(0, int(most) - _held(cgroup)))
    except (OSError, ValueError):
        pass
    return min(free, default=None)


def _held(cgroup: Path) -> int:
    """What a container holds and cannot give back: without the files that are only cached."""
    held = int((cgroup / "memory.current").read_text())
    try:
        kinds = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return held - int(kinds.get("inactive_file", 0))
    except (OSError, ValueError):
        return held


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory did not suffice, on any device.

    CUDA's libraries have words of their own for it; cuDNN also says "not supported" of what is too large.
    """
    said = any(words in str(error).lower() for words in _SAID)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (isinstance(error, RuntimeError) and said)
