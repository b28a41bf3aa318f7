"""The measurement of one batch size, a search, its result, and the memory that a larger size is expected to need."""

import math
import re
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from kasoku.core import Clock, InputError
from kasoku.core.hardware import resident_bytes
from kasoku.distributed.environment import place

_SHARE = 0.9  # of the free memory may be used; the rest is for other processes and for errors of the forecast
_SHORT = r"out of memory|can('|no)t allocate memory|cu(dnn|blas)_status_alloc_failed|cudnn_status_not_supported"
STEPS, BRIEF = 20, 4  # timed steps of a size: in full, in a brief measurement
_SIGMA = 1.4826  # of a normal distribution, in median absolute deviations
_MEDIAN = 1.2533  # standard error of a median, in sigma / sqrt(n)


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
        self.device, self._seen = device, 0
        self.peaks: list[tuple[int, int]] = []  # (batch, bytes), in ascending order of sizes

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
        free, sharing = available_bytes(), place().local_size  # ranks whose memory grows equally
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
    short = isinstance(error, RuntimeError) and re.search(_SHORT, str(error).lower())
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or bool(short)


@dataclass(frozen=True)
class Measurement:
    """The timings of one batch size, or the reason why it could not run.

    Args:
        batch: images of a step, over all ranks and parts.
        step_s: median seconds of a step, including the wait for input.
        low_s: two standard errors of the median below it.
        high_s: two standard errors above it.
        input_s: median seconds of a step spent waiting for input.
        utilisation: of the device, 0 to 1: the mean of the higher half of the readings; nan: unknown.
        failed: why there are no timings, such as "out of memory".
        steps: how many steps the medians are of.
    """

    batch: int
    step_s: float = math.inf
    low_s: float = math.inf
    high_s: float = math.inf
    input_s: float = 0.0
    utilisation: float = math.nan
    failed: str = ""
    steps: int = STEPS

    @property
    def images_per_s(self) -> float:
        """Images a second; 0 where it failed."""
        return 0.0 if self.failed else self.batch / self.step_s

    @property
    def error(self) -> float:
        """The median's standard error, as a share of it; 0 where it failed."""
        return 0.0 if self.failed else (self.high_s - self.low_s) / 4 / self.step_s


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, low, high) of at least one value: two standard errors of the median to each side, by the MAD."""
    middle = statistics.median(values)
    spread = statistics.median(abs(value - middle) for value in values)
    error = _MEDIAN * _SIGMA * spread / math.sqrt(len(values))
    return middle, max(0.0, middle - 2 * error), middle + 2 * error


@dataclass(frozen=True)
class Needs:
    """The measurements that a strategy needs."""

    watch_s: float = 0.0  # seconds during which utilization is read at each size; 0: not needed
    brief: bool = False  # time few steps at first; measuring a size again adds to them


@dataclass(frozen=True)
class BatchSizeResult:
    """The result of a batch-size search.

    Args:
        batch: the chosen size.
        samples: one measurement of each size, in the order of the search.
        why: the reason for the choice, in words.
        spent_s: seconds of the search.
        in_time: False: the budget ended the search, and this is the best size so far.
        epochs: of training to the target at each size, absolute or relative to the smallest branch; empty where the
            strategy does not use them.
        strategy: its name.
        budget_s: the time budget.
        speeds: images per second of each rank on its own at the chosen size; empty on one rank.
    """

    batch: int
    samples: tuple[Measurement, ...]
    why: str
    spent_s: float
    in_time: bool = True
    epochs: tuple[float, ...] = ()
    strategy: str = ""
    budget_s: float = 0.0
    speeds: tuple[float, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The contents of tuning.json."""
        samples = []
        for sample, epochs in zip(self.samples, self.epochs or [None] * len(self.samples), strict=True):
            goodput = sample.images_per_s / epochs if epochs and math.isfinite(epochs) else None
            derived = {"images_per_s": sample.images_per_s, "epochs": epochs, "goodput": goodput}
            samples.append(asdict(sample) | derived)
        document = {"chosen": self.batch, **asdict(self), "samples": samples}
        return {k: v for k, v in document.items() if k not in ("batch", "epochs")}


@dataclass
class SizeSearch:
    """A search: the sizes and the time that it may use, and the last measurement of each size.

    Raises InputError if there is no size in the range.

    Args:
        measure: measures a size; measuring it again may add to its earlier steps.
        start: the current size, where the strategies of [002] begin.
        least: the smallest size; rounded up to a multiple.
        most: the largest that may still be tried, rounded down; a size that fails lowers it.
        multiple: sizes are multiples of it.
        images: of an epoch.
        until_s: the deadline, on the clock.
        clock: the same on all ranks, from the start of the search.
        branch: (batch, multiple of the rates, images) -> the losses after each quarter of a branch; empty where memory
            is short. The first one is the trunk, at whose end the others begin.
        ranks: each trains all of a branch.
    """

    measure: Callable[[int], Measurement]
    start: int
    least: int
    most: int
    multiple: int
    images: int
    until_s: float
    clock: Clock
    branch: Callable[[int, float, int], Sequence[float]]
    ranks: int = 1
    samples: list[Measurement] = field(default_factory=list)
    failed: int | None = None  # the smallest size that failed

    def __post_init__(self) -> None:
        got = f"batches from {self.least} to {self.most}: none of them can be tried"
        self.least = -(-self.least // self.multiple) * self.multiple
        self.most = self.most // self.multiple * self.multiple
        if self.least > self.most:
            raise InputError(f"{got} (multiples of {self.multiple}, at most {self.images} images); give another range")

    def take(self, batch: int) -> Measurement | None:
        """Measures a size, in place of its earlier measurement; None if time is over. The first is always measured.

        A brief measurement is expected to take as long as smaller sizes suggest; after only one, its time is taken as
        proportional to the batch.
        """
        smaller = sorted((s.batch, s.step_s) for s in self.samples if s.batch <= batch and not s.failed)
        needed_s = BRIEF * extrapolate([(0, 0.0), *smaller], batch) if smaller else 0.0
        if self.samples and self.clock.now() + needed_s >= self.until_s:
            return None
        sample = self.measure(batch)
        self.samples = [*(s for s in self.samples if s.batch != batch), sample]
        if sample.failed:
            self.failed = min(batch, self.failed or batch)
            self.most = min(self.most, (batch - 1) // self.multiple * self.multiple)
        return sample

    @property
    def good(self) -> list[Measurement]:
        """The sizes that ran, the smallest first. Raises InputError if all failed."""
        good = [s for s in self.samples if not s.failed and s.batch < (self.failed or math.inf)]
        if not good:
            first = self.samples[0]
            advice = "start with a smaller batch, or take a smaller model or a device with more memory"
            short = InputError(f"batch={first.batch}: {first.failed}: {advice}")
            short.memory_short = True
            raise short
        return sorted(good, key=lambda s: s.batch)

    def result(
        self, batch: int, why: str, *, epochs: Callable[[int], float] | None = None, in_time: bool = True
    ) -> BatchSizeResult:
        why = why if in_time else f"time was over, the best so far: {why}"
        of_each = tuple(epochs(s.batch) for s in self.samples) if epochs else ()
        return BatchSizeResult(batch, tuple(self.samples), why, self.clock.now(), in_time, of_each)
