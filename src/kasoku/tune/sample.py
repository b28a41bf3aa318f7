"""What was measured of a minibatch size, within which limits sizes are tried, and what was found."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kasoku.core import Clock, InputError
from kasoku.core.run import write_atomically

STEPS, BRIEF = 20, 5  # of a size that are timed: in full, at a look
LATE = "there is no time left for it"  # why a size was not tried; says nothing of the size
_SIGMA = 1.4826  # of a normal distribution, in median absolute deviations
_MEDIAN = 1.2533  # standard error of a median, in sigma / sqrt(n)


@dataclass(frozen=True)
class Sample:
    """One size tried, or why it could not be.

    Args:
        batch: images of a step, over all ranks and parts.
        step_s: seconds of a step with its wait for input, the median.
        low_s: where the median's interval begins, two standard errors below it.
        high_s: where it ends.
        input_s: what of step_s was waiting for input, the median.
        utilisation: of the device, 0 to 1: the mean of the higher half of what was seen; nan: not known.
        noise: gradient noise scale in images, as far as it is known by now; None: it was not measured, or too large
            to be seen.
        failed: why there is nothing above, such as "out of memory".
        steps: that it is the median of.
        parts: in which a device took its share of the batch, one after the other.
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
    parts: int = 1

    @property
    def images_per_s(self) -> float:
        """Images a second; 0 where it failed."""
        return 0.0 if self.failed else self.batch / self.step_s

    @property
    def error(self) -> float:
        """The median's standard error, as a share of it; 0 where it failed."""
        return 0.0 if self.failed else (self.high_s - self.low_s) / 4 / self.step_s

    def epoch_s(self, images: int) -> float:
        """Seconds that so many images take."""
        return math.inf if self.failed else images / self.images_per_s


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, low, high) of at least one value: two standard errors of the median to each side, by the MAD."""
    middle = statistics.median(values)
    spread = statistics.median(abs(value - middle) for value in values)
    error = _MEDIAN * _SIGMA * spread / math.sqrt(len(values))
    return middle, max(0.0, middle - 2 * error), middle + 2 * error


Measure = Callable[[int], Sample]  # a further look at a size may add to those before


@dataclass(frozen=True)
class Needs:
    """What a strategy must have measured.

    Args:
        noise: the gradient noise scale.
        watch_s: for how long utilisation is watched at each size; 0: it need not be known.
        brief: a size is looked at briefly; each further look goes on from those before.
    """

    noise: bool = False
    watch_s: float = 0.0
    brief: bool = False


@dataclass(frozen=True)
class Limits:
    """What a search may try.

    Args:
        start: the size that is used now, where [002]'s strategies begin.
        least: the smallest size.
        most: the largest.
        multiple: sizes are multiples of it.
        images: of an epoch.
        until_s: when time is over, on the clock.
        clock: the same on all ranks.

    Raises:
        InputError: where there is no size in the range.
    """

    start: int
    least: int
    most: int
    multiple: int
    images: int
    until_s: float
    clock: Clock

    def __post_init__(self) -> None:
        if self.least < 1 or self.multiple < 1:
            raise InputError(f"least={self.least}, multiple={self.multiple}: at least 1 image each")
        if self.first > self.last:
            raise InputError(
                f"batches from {self.least} to {self.most}: none of them can be tried (multiples of {self.multiple}, "
                f"at most {self.images} images); give another range"
            )

    @property
    def first(self) -> int:
        """The smallest multiple."""
        return -(-self.least // self.multiple) * self.multiple

    @property
    def last(self) -> int:
        """The largest multiple."""
        return self.most // self.multiple * self.multiple

    @property
    def begin(self) -> int:
        """The multiple nearest to `start`, within the limits."""
        return min(max(round(self.start / self.multiple) * self.multiple, self.first), self.last)

    @property
    def over(self) -> bool:
        """Whether time is over."""
        return self.clock.now() >= self.until_s


@dataclass(frozen=True)
class Found:
    """What a search found.

    Args:
        batch: the size to take.
        samples: of the sizes tried, in that order.
        why: in words.
        spent_s: seconds it took.
        in_time: False: time was over before the search was, and this is the best so far.
        epochs: what each sample's size takes to the target, in epochs, or in those of the size used now; empty where
            the strategy does not ask.
        strategy: its name.
        budget_s: seconds it was given.
        speeds: images a second of each rank by itself at the size found; empty on one rank.
    """

    batch: int
    samples: tuple[Sample, ...]
    why: str
    spent_s: float
    in_time: bool = True
    epochs: tuple[float, ...] = ()
    strategy: str = ""
    budget_s: float = 0.0
    speeds: tuple[float, ...] = ()

    @property
    def sample(self) -> Sample:
        """The last one of the size found."""
        return next(s for s in reversed(self.samples) if s.batch == self.batch and not s.failed)

    def as_json(self) -> dict[str, Any]:
        """The contents of tuning.json; null stands for an unknown value."""
        samples = []
        for sample, epochs in zip(self.samples, self.epochs or [None] * len(self.samples), strict=True):
            goodput = sample.images_per_s / epochs if epochs else None
            derived = {"images_per_s": sample.images_per_s, "epochs": epochs, "goodput": goodput}
            samples.append({k: _finite_or_none(v) for k, v in (asdict(sample) | derived).items()})
        document = {"what": "minibatch", "chosen": self.batch, **asdict(self), "samples": samples}
        return {k: _finite_or_none(v) for k, v in document.items() if k not in ("batch", "epochs")}

    def save(self, path: Path) -> None:
        """Writes tuning.json. Raises InputError where the file cannot be written."""
        write_atomically(path, lambda part: part.write_text(json.dumps(self.as_json(), indent=1)))


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class Tries:
    """The sizes tried so far. A size that failed bounds the others from above."""

    measure: Measure
    limits: Limits
    samples: list[Sample] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.began_s = self.limits.clock.now()
        self.failed: int | None = None  # the smallest size that did
        self.late = False  # a size was left out for want of time

    def take(self, batch: int) -> Sample:
        """Tries a size; one for which there is no time ends the search."""
        sample = self.measure(batch)
        if sample.failed == LATE:
            self.late = True
            return sample
        self.samples.append(sample)
        if sample.failed:
            self.failed = min(batch, self.failed or batch)
        return sample

    def again(self, batch: int) -> None:
        """Measures a size anew, and forgets what was seen of it before."""
        before = [s for s in self.samples if s.batch == batch]
        if self.take(batch).failed != LATE:
            for sample in before:
                self.samples.remove(sample)

    @property
    def most(self) -> int:
        """The largest size that may still be tried."""
        if self.failed is None:
            return self.limits.last
        return min(self.limits.last, (self.failed - 1) // self.limits.multiple * self.limits.multiple)

    @property
    def good(self) -> list[Sample]:
        """The last sample of each size that did not fail, the smallest first. Raises InputError where all failed."""
        good = {s.batch: s for s in self.samples if not s.failed and s.batch < (self.failed or math.inf)}
        if not good:
            first = self.samples[0]
            raise InputError(
                f"batch={first.batch}: {first.failed}: start with a smaller batch, or take a smaller model or a device "
                "with more memory"
            )
        return [good[batch] for batch in sorted(good)]

    @property
    def first(self) -> Sample:
        """The first one that did not fail."""
        return next(s for s in self.samples if not s.failed)

    @property
    def last(self) -> Sample | None:
        """The last one that did not fail."""
        return next((s for s in reversed(self.samples) if not s.failed), None)

    @property
    def over(self) -> bool:
        """Whether time is over; the first size is tried in any case."""
        return bool(self.samples) and (self.late or self.limits.over)

    def found(
        self, batch: int, why: str, *, epochs: Callable[[int], float] | None = None, in_time: bool = True
    ) -> Found:
        """The end of the search."""
        if not in_time:
            why = f"time was over, the best so far: {why}"
        of_each = tuple(epochs(s.batch) for s in self.samples) if epochs else ()
        return Found(batch, tuple(self.samples), why, self.limits.clock.now() - self.began_s, in_time, of_each)
