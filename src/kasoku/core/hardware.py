"""Facts about hardware and memory layout that several packages need."""

import math
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kasoku.core.errors import InputError
from kasoku.core.torch_internals import cpu_computes_bf16


def computes_bf16(device: torch.device) -> bool:
    """True where the hardware computes bfloat16: CUDA from 8.0, x86 with avx512_bf16 or AMX."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and cpu_computes_bf16()


def laid_out_like(p: Tensor, x: Any) -> Any:
    """The tensor x with the strides of p, when it has p's shape; anything else as it is.

    torch's fused optimizers on CPU read parameter, gradient and state as flat memory without a look at their strides.
    """
    if not isinstance(x, Tensor) or x.shape != p.shape or x.stride() == p.stride():
        return x
    return torch.empty_strided(p.shape, p.stride(), dtype=x.dtype, device=x.device).copy_(x)


def is_dense(x: Tensor) -> bool:
    """True where x fills its memory without a gap, in whatever order of dimensions."""
    return x.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(x))


def cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """The cores of the process's affinity mask, or fewer where a cgroup (a container) limits its time."""
    allowed: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:  # version 2: "max 100000" or "150000 100000"
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:  # version 1: -1 is no limit
            quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text()
        except OSError:
            return int(allowed)
    with suppress(ValueError):
        if int(quota) > 0:
            allowed = min(allowed, int(quota) / int(period))
    return max(1, math.ceil(allowed))


def resident_bytes() -> int:
    """Bytes that this process has in memory; 0 where the system does not say (outside Linux)."""
    return memory_in_use(torch.device("cpu"))[0]


def memory_in_use(device: torch.device) -> tuple[int, int]:
    """Bytes in use, and the most so far: allocated on CUDA, elsewhere resident in this process; zeros: unknown."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    try:
        kib = dict(re.findall(r"(VmRSS|VmHWM):\s+(\d+) kB", Path("/proc/self/status").read_text()))
        return 1024 * int(kib["VmRSS"]), 1024 * int(kib["VmHWM"])
    except (OSError, KeyError):  # outside Linux
        return 0, 0


class Utilization:
    """The share of its time that a device was busy: this process's CPU time over wall time x cores; on CUDA NVML's.

    NVML's figure is of the last sixth of a second to second, and of all processes. No GPU has run this.
    """

    def __init__(self, device: torch.device, cores: float) -> None:
        self.device, self.cores = device, cores
        self._before = time.perf_counter(), time.process_time()

    @property
    def since_s(self) -> float:
        """Seconds since the last reading."""
        return time.perf_counter() - self._before[0]

    def read(self) -> float:
        """The share since the last reading, 0 to 1; nan: not known of this device. Raises InputError without NVML."""
        before, self._before = self._before, (time.perf_counter(), time.process_time())
        wall_s, busy_s = (now - then for now, then in zip(self._before, before, strict=True))
        if self.device.type != "cuda":
            return min(1.0, busy_s / max(1e-9, wall_s) / self.cores) if self.device.type == "cpu" else math.nan
        try:
            return torch.cuda.utilization(self.device) / 100
        except ModuleNotFoundError as error:
            why = "is read through NVML, whose package is missing: pip install 'kasoku[nvml]'"
            raise InputError(f"the GPU's utilisation {why}") from error
        except Exception as error:  # NVML has an error class of its own for each refusal
            raise InputError(f"the GPU's utilisation cannot be read ({error}): take the strategy Throughput") from error

    def metrics(self) -> dict[str, float]:
        """The utilization since the last reading, and the bytes in use and at most, as far as they are known."""
        in_use, most = memory_in_use(self.device)
        values: dict[str, float] = {"memory_bytes": in_use, "memory_peak_bytes": most} if most else {}
        with suppress(InputError):
            values["utilization"] = round(self.read(), 4)
        return {name: value for name, value in values.items() if math.isfinite(value)}
