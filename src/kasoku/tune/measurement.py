"""The measurement of one batch size, a search, and its result."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kasoku.core import Clock, InputError
from kasoku.tune.memory_forecast import extrapolate

STEPS, BRIEF = 20, 5  # timed steps of a size: in full, in a brief measurement
_SIGMA = 1.4826  # of a normal distribution, in median absolute deviations
_MEDIAN = 1.2533  # standard error of a median, in sigma / sqrt(n)


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
        noise: the current estimate of the gradient noise scale, in images; None: not measured, or too large to be
            seen.
        failed: why there are no timings, such as "out of memory".
        steps: how many steps the medians are of.
    """

    batch: int
    step_s: float = math.inf
    low_s: float = math.inf
    high_s: float = math.inf
    input_s: float = 0.0
    utilisation: float = math.nan
    noise: float | None = None
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

    noise: bool = False  # the gradient noise scale
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
        epochs: of training to the target at each size, absolute or relative to the current size; empty where the
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

    @property
    def sample(self) -> Measurement:
        """The measurement of the chosen size."""
        return next(s for s in self.samples if s.batch == self.batch)

    def as_json(self) -> dict[str, Any]:
        """The contents of tuning.json."""
        samples = []
        for sample, epochs in zip(self.samples, self.epochs or [None] * len(self.samples), strict=True):
            goodput = sample.images_per_s / epochs if epochs else None
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
        clock: the same on all ranks.
    """

    measure: Callable[[int], Measurement]
    start: int
    least: int
    most: int
    multiple: int
    images: int
    until_s: float
    clock: Clock
    samples: list[Measurement] = field(default_factory=list)
    failed: int | None = None  # the smallest size that failed

    def __post_init__(self) -> None:
        got = f"batches from {self.least} to {self.most}: none of them can be tried"
        self.began_s = self.clock.now()
        self.least = -(-self.least // self.multiple) * self.multiple
        self.most = self.most // self.multiple * self.multiple
        if self.least > self.most:
            raise InputError(f"{got} (multiples of {self.multiple}, at most {self.images} images); give another range")

    def take(self, batch: int) -> Measurement | None:
        """Measures a size, in place of its earlier measurement; None if no time is left for it, except for the first.

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
            raise InputError(f"batch={first.batch}: {first.failed}: {advice}")
        return sorted(good, key=lambda s: s.batch)

    def result(
        self, batch: int, why: str, *, epochs: Callable[[int], float] | None = None, in_time: bool = True
    ) -> BatchSizeResult:
        why = why if in_time else f"time was over, the best so far: {why}"
        of_each = tuple(epochs(s.batch) for s in self.samples) if epochs else ()
        spent_s = self.clock.now() - self.began_s
        return BatchSizeResult(batch, tuple(self.samples), why, spent_s, in_time, of_each)
