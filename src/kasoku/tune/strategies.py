"""How a minibatch is searched for; each strategy is deterministic given the samples, so all ranks agree."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Protocol

from kasoku.core import InputError
from kasoku.tune.measurement import BatchSizeResult, Limits, Measure, Measurement, Needs, SizeSearch
from kasoku.tune.size_search import search_sizes

_CHECK = 5  # loops from one look at convergence to the next
_LOOPS = 100
_STEP = 10  # the most that a size grows by


class Strategy(Protocol):
    """Searches a size by measuring some."""

    @property
    def needs(self) -> Needs:
        """What must be measured for it."""
        ...

    def search(self, measure: Measure, limits: Limits) -> BatchSizeResult:
        """Tries sizes within the limits; the best so far where time is over. Raises InputError where none can run."""
        ...


class _Look(NamedTuple):
    settled_by: float  # converged when this changes by little in five loops
    grow: bool
    loss: float  # out of time, the size of least loss is taken
    why: str


class _Growth:
    """The searches of [002]: each loop the step grows by one multiple, to ten at most. They are baselines.

    Ref: [002] 5, listings 2 and 3. The rule of growth was inferred from the results, and gives all sizes of listing 3.
    TuneSettings the size shrinks is not known; here the step starts at one again at each turn.
    """

    near: ClassVar[float]

    def search(self, measure: Measure, limits: Limits) -> BatchSizeResult:
        """The size at which it converged, or the last one that worked; out of time, the best so far."""
        tries, looks = SizeSearch(measure, limits), dict[int, _Look]()
        size, step, grow, checked = limits.begin, 1, True, math.nan
        for loop in range(_LOOPS + 1):
            if tries.over:
                batch = min((s.batch for s in tries.good), key=lambda b: looks[b].loss)
                return tries.found(batch, looks[batch].why, in_time=False)
            before, sample = size, tries.take(size)
            if tries.late:
                continue
            if sample.failed and looks:
                break
            if sample.failed:
                size = max(limits.first, size // 2 // limits.multiple * limits.multiple)
            else:
                look = looks[size] = self._look(sample, tries.first, limits)
                if loop % _CHECK == 0 or len(looks) == 1:
                    if abs(look.settled_by - checked) <= self.near:
                        return tries.found(size, f"{look.why}, converged in {loop} loops")
                    checked = look.settled_by
                step, grow = min(step + 1, _STEP) if look.grow == grow else 1, look.grow
                size = min(max(size + (step if grow else -step) * limits.multiple, limits.first), tries.most)
            if size == before:
                break
        last, end = tries.last or tries.good[-1], tries.samples[-1]  # `good` raises where no size worked
        why = f"; batch {end.batch}: {end.failed}" if end.failed else f", after {len(tries.samples) - 1} loops"
        return tries.found(last.batch, looks[last.batch].why + why)

    def _look(self, sample: Measurement, first: Measurement, limits: Limits) -> _Look:
        raise NotImplementedError


@dataclass(frozen=True)
class GpuUsageMaximize(_Growth):
    """Grows the batch until the device is used to `target`, 0 to 1. Utilization is not speed, as [002] found, too."""

    target: float = 0.99
    near: ClassVar[float] = 5  # multiples
    needs: ClassVar[Needs] = Needs(watch_s=1.0)  # after a second NVML has renewed its figure

    def __post_init__(self) -> None:
        if not 0 < self.target <= 1:
            raise InputError(f"target={self.target}: a share above 0 and at most 1")

    def _look(self, sample: Measurement, first: Measurement, limits: Limits) -> _Look:
        used = sample.utilisation
        if math.isnan(used):
            raise InputError("GpuUsageMaximize: this device does not tell how much it is used: take Throughput")
        far = abs(used - self.target)
        return _Look(sample.batch / limits.multiple, used < self.target, far, f"the device is used to {used:.0%}")


@dataclass(frozen=True)
class EpochTimeMinimize(_Growth):
    """Grows the batch until the time of an epoch no longer falls."""

    near: ClassVar[float] = 0.05  # of the first size's epoch
    needs: ClassVar[Needs] = Needs()

    def _look(self, sample: Measurement, first: Measurement, limits: Limits) -> _Look:
        ratio = first.images_per_s / sample.images_per_s
        return _Look(ratio, True, ratio, f"an epoch takes {ratio:.2f} times as long as with {first.batch}")


@dataclass(frozen=True)
class Throughput:
    """The size with the most images a second.

    Args:
        least_gain: a size that promises less than this share is not tried.

    Saves: most of an exhaustive sweep's time; see the Note in climb.py.
    Costs: six steps each of four to ten sizes, and as many more of those between which it is not clear.
    Maths: a step takes a + c * b seconds between cliffs. A size that loses at most half a percent to a larger
        one is taken in its place.
    """

    least_gain: float = 0.02

    def __post_init__(self) -> None:
        _check_gain(self.least_gain)

    @property
    def needs(self) -> Needs:
        """A brief look at most sizes."""
        return Needs(brief=True)

    def search(self, measure: Measure, limits: Limits) -> BatchSizeResult:
        """The size with the most images a second."""
        tries = SizeSearch(measure, limits)
        best, in_time = search_sizes(tries, lambda: _rate, least_gain=self.least_gain)
        return tries.found(best.batch, _most(best, tries), in_time=in_time)


@dataclass(frozen=True)
class TimeToTarget:
    """The size that reaches the target soonest: images a second, over the images that it takes.

    Args:
        epochs: (batch, epochs to the target) of at least two sizes, the smallest first, where that is known: such as
            the points of a recipe. Between them epochs are interpolated along the logarithm of the batch, and sizes
            outside are not tried. None given: by the gradient noise scale, measured at the probe's steps.
        least_gain: a size that promises less than this share is not tried.

    Maths: an image at batch B is worth (phi + B0) / (phi + B) of one at B0, with the noise scale phi; so epochs grow
        like phi + B. The scale is the median of the later half of the looks, and grows as a training goes on: with it
        the size found is rather too small than too large. Where it cannot be seen, images are all worth the same.
    Ref: McCandlish et al. 2018 (arXiv 1812.06162); the product: Pollux, Qiao et al. 2021 (arXiv 2008.12260).
    """

    epochs: tuple[tuple[int, float], ...] = ()
    least_gain: float = 0.02

    def __post_init__(self) -> None:
        _check_gain(self.least_gain)
        sizes = [batch for batch, _ in self.epochs]
        good = sizes == sorted(set(sizes)) and all(b >= 1 and 0 < e < math.inf for b, e in self.epochs)
        if self.epochs and (len(sizes) < 2 or not good):
            raise InputError(
                f"epochs={self.epochs}: at least two pairs (batch, epochs) are wanted, the smallest batch first, all "
                "above 0"
            )

    @property
    def needs(self) -> Needs:
        """The noise scale, where no curve is given."""
        return Needs(noise=not self.epochs, brief=True)

    def search(self, measure: Measure, limits: Limits) -> BatchSizeResult:
        """The size with the most images a second, each counted by what it is worth."""
        if self.epochs:
            limits = replace(
                limits, least=max(limits.least, self.epochs[0][0]), most=min(limits.most, self.epochs[-1][0])
            )
        tries = SizeSearch(measure, limits)

        def epochs(batch: int) -> float:
            return self.takes(batch, limits.start, _scale(tries.samples))

        def goodput(batch: int, step_s: float) -> float:
            return batch / step_s / epochs(batch)

        best, in_time = search_sizes(tries, lambda: goodput, least_gain=self.least_gain)
        return tries.found(best.batch, self._why(best, tries), epochs=epochs, in_time=in_time)

    def takes(self, batch: int, start: int, scale: float | None) -> float:
        """Epochs to the target by the curve; or in those of `start`, by the noise scale."""
        if not self.epochs:
            return (scale + batch) / (scale + start) if scale is not None else 1.0
        for (low, before), (high, after) in itertools.pairwise(self.epochs):
            if batch <= high:
                way = math.log(max(batch, low) / low) / math.log(high / low)
                return before + (after - before) * way
        return self.epochs[-1][1]

    def _why(self, best: Measurement, tries: SizeSearch) -> str:
        rate = f"{best.images_per_s:,.0f} images/s"
        if self.epochs:
            takes = self.takes(best.batch, 0, None)
            seconds = takes * best.epoch_s(tries.limits.images)
            return f"{rate} and {takes:.1f} epochs make {seconds:,.0f} s, the least of {len(tries.good)} sizes"
        scale = _scale(tries.samples)
        if scale is None:
            return f"{_most(best, tries)}; the gradient noise scale could not be seen, so images count the same"
        start = tries.limits.start
        more = self.takes(best.batch, start, scale)
        return (
            f"{rate} at {more:.2f} times the epochs of batch {start} (gradient noise scale {scale:,.0f} images), the "
            f"best of {len(tries.good)} sizes"
        )


def _rate(batch: int, step_s: float) -> float:
    return batch / step_s


def _scale(samples: Sequence[Measurement]) -> float | None:
    """The noise scale as it is known by now: each sample tells that of all up to it."""
    return next((s.noise for s in reversed(samples) if s.noise is not None), None)


def _most(best: Measurement, tries: SizeSearch) -> str:
    good = tries.good
    return f"{best.images_per_s:,.0f} images/s, the most of {len(good)} sizes from {good[0].batch} to {good[-1].batch}"


def _check_gain(least_gain: float) -> None:
    if not 0 < least_gain < 1:
        raise InputError(f"least_gain={least_gain}: a share above 0 and below 1, such as 0.02")
