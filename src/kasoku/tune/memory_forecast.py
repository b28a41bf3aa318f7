"""Predicts the memory that a batch size needs from the peaks of smaller sizes, before it is tried."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from kasoku.core.hardware import resident_bytes
from kasoku.distributed.environment import ranks_on_host

_SHARE = 0.9  # of the free memory may be used; the rest is for other processes and for errors of the forecast
_MESSAGES = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "cudnn_status_alloc_failed",
    "cudnn_status_not_supported",
    "cublas_status_alloc_failed",
)


def extrapolate(costs: Sequence[tuple[int, float]], batch: int) -> float:
    """What a larger batch costs, by the line through the last two of (batch, cost); a falling line is taken as flat."""
    (low, low_cost), (high, high_cost) = costs[-2:]
    an_image = max(0.0, (high_cost - low_cost) / (high - low))
    return high_cost + an_image * (batch - high)


class MemoryForecast:
    """The peaks of the sizes tried on one device.

    On CUDA torch's peak allocation; on a CPU the resident size of the process after forward, with all activations.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peaks: list[tuple[int, int]] = []  # (batch, bytes), in ascending order of sizes
        self._seen = 0

    def begin(self) -> None:
        self._seen = 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def look(self) -> None:
        """Reads the memory; call it between forward and backward."""
        if self.device.type == "cpu":
            self._seen = max(self._seen, resident_bytes())

    def note(self, batch: int) -> None:
        """Records the peak of a size that ran."""
        if self.device.type == "cuda":
            self._seen = torch.cuda.max_memory_allocated(self.device)
        if self._seen and (not self.peaks or batch > self.peaks[-1][0]):
            self.peaks.append((batch, self._seen))

    def fits(self, batch: int) -> bool:
        """Whether a size is expected to fit; True if unknown."""
        if len(self.peaks) < 2 or batch <= self.peaks[-1][0]:
            return True
        needed = extrapolate(self.peaks, batch)
        if self.device.type == "cuda":
            free_bytes, _ = torch.cuda.mem_get_info(self.device)
            now = torch.cuda.memory_allocated(self.device)
            unused = torch.cuda.memory_reserved(self.device) - now
            return needed - now <= _SHARE * (free_bytes + unused)
        free, sharing = available_bytes(), ranks_on_host() or 1  # ranks whose memory grows equally
        return free is None or sharing * (needed - resident_bytes()) <= _SHARE * free


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The memory that can still be allocated without swapping, on this machine and container; None: unknown.

    Ref: proc_meminfo(5), MemAvailable; the kernel's cgroup-v2.rst, memory.max and memory.current.
    """
    free: list[int] = []
    with suppress(OSError, ValueError, KeyError, IndexError):
        lines = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines() if ":" in line)
        free.append(int(lines["MemAvailable"].split()[0]) * 1024)
    with suppress(OSError, ValueError):
        most = (cgroup / "memory.max").read_text().strip()
        if most != "max":
            held = int((cgroup / "memory.current").read_text())
            with suppress(OSError, ValueError):  # without cached files, which the kernel can reclaim
                kinds = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
                held -= int(kinds.get("inactive_file", 0))
            free.append(max(0, int(most) - held))
    return min(free, default=None)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory was short, on any device.

    CUDA's libraries have their own messages; cuDNN also reports "not supported" for sizes that are too large.
    """
    message = any(words in str(error).lower() for words in _MESSAGES)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (isinstance(error, RuntimeError) and message)
