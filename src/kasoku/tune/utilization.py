"""The utilization of a device, 0 to 1, while steps run on it."""

from __future__ import annotations

import math
import time
from typing import Self

import torch

from kasoku.core import InputError

_EVERY_S = 0.2  # NVML renews its figure every sixth of a second to every second


class UtilizationMonitor:
    """Reads a device's utilization after each step: on CUDA from NVML, on a CPU this process's share of its threads.

    `needed`: raise InputError, with what to install, where NVML cannot be read; otherwise `value` is nan.
    """

    def __init__(self, device: torch.device, *, needed: bool) -> None:
        self.device, self.needed, self.seen = device, needed, list[float]()
        self._before = -1.0, 0.0  # wall and process time at the last reading

    def __enter__(self) -> Self:
        self.step()
        self.seen.clear()
        return self

    def __exit__(self, *error: object) -> None:
        if self.device.type == "cuda" and not any(error):
            self._read_nvml()

    @property
    def value(self) -> float:
        """The mean of the higher half of the readings; nan of none. Ref: [002] 5: low values are gaps between steps."""
        kept = sorted(self.seen)[len(self.seen) // 2 :]
        return sum(kept) / len(kept) if kept else math.nan

    def step(self) -> None:
        """A step has ended."""
        now = time.perf_counter(), time.process_time()
        wall_s, busy_s = now[0] - self._before[0], now[1] - self._before[1]
        if self.device.type == "cuda" and wall_s > _EVERY_S:
            self._before = now
            self._read_nvml()
        elif self.device.type == "cpu" and wall_s > 0:
            self._before = now
            self.seen.append(min(1.0, busy_s / wall_s / torch.get_num_threads()))

    def _read_nvml(self) -> None:
        try:
            self.seen.append(torch.cuda.utilization(self.device) / 100)
        except Exception as error:  # NVML has an error class of its own for each refusal
            if self.needed:
                why = f"cannot be read ({error}): take the strategy Throughput"
                if isinstance(error, ModuleNotFoundError):
                    why = "is read through NVML, whose package is missing: pip install 'kasoku[nvml]'"
                raise InputError(f"the GPU's utilisation {why}") from error
