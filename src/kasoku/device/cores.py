"""How many cores this process may use."""

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def cores(cgroup: Path = _CGROUP) -> int:
    """The cores of the process's affinity mask, or fewer where a cgroup (a container) limits its time."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(allowed, _quota(cgroup))))


def _quota(cgroup: Path) -> float:
    try:  # version 2: "max 100000" or "150000 100000"
        quota, period = (cgroup / "cpu.max").read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:  # version 1: -1 is no limit
        quota_us = int((cgroup / "cpu/cpu.cfs_quota_us").read_text())
        period_us = int((cgroup / "cpu/cpu.cfs_period_us").read_text())
        return quota_us / period_us if quota_us > 0 else math.inf
    except (OSError, ValueError):
        return math.inf
