"""How much of a device is used, 0 to 1, while steps are made."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from typing import Self

import torch

from kasoku.core import InputError

_EVERY_S = 0.2  # NVML renews its figure every sixth of a second to every second


def higher_half(values: Sequence[float]) -> float:
    """The mean of the higher half; nan of none. Ref: [002] 5: what is low is the time between steps."""
    kept = sorted(values)[len(values) // 2 :]
    return sum(kept) / len(kept) if kept else math.nan


class Usage:
    """Watches a device while its context lasts.

    On CUDA by NVML, as often as that looks; on a CPU the time of this process over that of the threads torch may use,
    step by step.

    Args:
        device: what is watched.
        needed: an error where its utilisation cannot be read; else it is nan.

    Raises:
        InputError: where NVML cannot be read, with what to install.
    """

    def __init__(self, device: torch.device, *, needed: bool) -> None:
        self.device, self.needed = device, needed
        self.seen: list[float] = []
        self._before = (0.0, 0.0)
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._before = (time.perf_counter(), time.process_time())
        if self.device.type == "cuda" and self._look():
            self.seen.clear()  # of the time before
            self._thread = threading.Thread(target=self._watch, name="kasoku-usage", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is not None:
            self._end.set()
            self._thread.join()
            if not self.seen and not any(error):
                self._look()

    def step(self) -> None:
        """A step has ended."""
        if self.device.type == "cpu":
            now = (time.perf_counter(), time.process_time())
            wall_s, busy_s = now[0] - self._before[0], now[1] - self._before[1]
            self._before = now
            if wall_s > 0:
                self.seen.append(min(1.0, busy_s / wall_s / torch.get_num_threads()))

    @property
    def value(self) -> float:
        """The mean of the higher half of what was seen; nan where nothing was."""
        return higher_half(self.seen)

    def _watch(self) -> None:
        while not self._end.wait(_EVERY_S):
            self._look()

    def _look(self) -> bool:
        try:
            self.seen.append(torch.cuda.utilization(self.device) / 100)
        except ModuleNotFoundError as error:
            if self.needed:
                raise InputError(
                    "the GPU's utilisation is read through NVML, whose package is missing: pip install 'kasoku[nvml]'"
                ) from error
            return False
        except Exception as error:  # NVML has an error class of its own for each thing it does not do
            if self.needed and self._thread is None:
                line = f"the GPU's utilisation cannot be read ({error}): take the strategy Throughput"
                raise InputError(line) from error
            return False
        return True
