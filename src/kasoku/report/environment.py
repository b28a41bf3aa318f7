"""The environment of a run: versions, commit, machine; written beside every result."""

import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kasoku import __version__
from kasoku.core.hardware import cores
from kasoku.data.decode.native import decoder


def environment() -> dict[str, Any]:
    """Versions, the commits of the working folder and of kasoku's source (None outside git), and the machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor() or platform.machine()
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "versions": {"kasoku": __version__} | {n: version(n) for n in ("torch", "numpy", "pillow", "safetensors")},
        "commit": _commit(Path.cwd()),
        "kasoku_commit": _commit(Path(__file__).parent),
        "jpeg_decoder": decoder(),
        "machine": {
            "system": platform.platform(),
            "cpu": cpu,
            "cores": cores(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "threads": torch.get_num_threads(),
        },
    }


def _commit(folder: Path) -> str | None:
    describe = ["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    command = ["git", "-C", str(folder), "-c", "core.fsmonitor=false", *describe]  # that setting names a program
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() if process.returncode == 0 else None
