"""Strategies of the batch-size search. Each depends on the measurements alone, so all ranks agree."""

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np

from kasoku.core import Checked, InputError, Range
from kasoku.tune.measurement import BatchSizeResult, Measurement, Needs, SizeSearch
from kasoku.tune.size_search import search_sizes

_CHECK_EVERY = 5  # loops between two tests of convergence
_MAX_LOOPS = 100
_MAX_STEP = 10  # multiples by which a size grows at most
_Gain = Annotated[float, Range("a share such as 0.02", above=0, below=1)]


@runtime_checkable
class Strategy(Protocol):
    """Searches the best size by measuring some sizes. A recipe's `tune.strategy` can name one of your own."""

    @property
    def needs(self) -> Needs: ...

    def search(self, tries: SizeSearch) -> BatchSizeResult:
        """Tries sizes; returns the best so far when time is over. Raises InputError if none runs."""


class _Assessment(NamedTuple):
    settled_by: float  # the search has converged when this changes little in five loops
    grow: bool
    loss: float  # when time is over, the size with the least loss is chosen
    why: str


class _Growth(Checked):
    """The searches of [002], as baselines: in each loop the step grows by one multiple, to at most ten.

    Ref: [002] 5, listings 2 and 3. The rule of growth was inferred from the results, and yields all sizes of listing 3.
    The rule by which the size shrinks is unknown; here the step starts at one again at each turn.
    """

    near: ClassVar[float]

    def search(self, tries: SizeSearch) -> BatchSizeResult:
        """The size at convergence, or the last one that ran; when time is over, the best so far."""
        ran, assessed = list[Measurement](), dict[int, _Assessment]()
        size = min(max(round(tries.start / tries.multiple) * tries.multiple, tries.least), tries.most)
        step, grow, checked = 1, True, math.nan
        for loop in range(_MAX_LOOPS + 1):
            before, sample = size, tries.take(size)
            if sample is None:
                batch = min((s.batch for s in tries.good), key=lambda b: assessed[b].loss)
                return tries.result(batch, assessed[batch].why, in_time=False)
            if sample.failed and assessed:
                break
            if sample.failed:
                size = max(tries.least, size // 2 // tries.multiple * tries.multiple)
            else:
                ran.append(sample)
                assessment = assessed[size] = self._assess(sample, ran[0], tries.multiple)
                if loop % _CHECK_EVERY == 0 or len(assessed) == 1:
                    if abs(assessment.settled_by - checked) <= self.near:
                        return tries.result(size, f"{assessment.why}, converged in {loop} loops")
                    checked = assessment.settled_by
                step, grow = min(step + 1, _MAX_STEP) if assessment.grow == grow else 1, assessment.grow
                size = min(max(size + (step if grow else -step) * tries.multiple, tries.least), tries.most)
            if size == before:
                break
        last, end = (ran or tries.good)[-1], tries.samples[-1]  # `good` raises where no size worked
        why = f"; batch {end.batch}: {end.failed}" if end.failed else f", after {loop} loops"
        return tries.result(last.batch, assessed[last.batch].why + why)

    def _assess(self, sample: Measurement, first: Measurement, multiple: int) -> _Assessment:
        raise NotImplementedError


@dataclass(frozen=True)
class GpuUsageMaximize(_Growth):
    """Grows the batch until the device is used to `target`, 0 to 1. Utilization is not speed, as [002] reports too."""

    target: Annotated[float, Range(above=0, at_most=1)] = 0.99
    near: ClassVar[float] = 5  # multiples
    needs: ClassVar[Needs] = Needs(watch_s=1.0)  # within a second NVML renews its figure

    def _assess(self, sample: Measurement, first: Measurement, multiple: int) -> _Assessment:
        used = sample.utilisation
        if math.isnan(used):
            raise InputError("GpuUsageMaximize: the utilization of this device is unknown: take Throughput")
        far = abs(used - self.target)
        return _Assessment(sample.batch / multiple, used < self.target, far, f"the device is used to {used:.0%}")


@dataclass(frozen=True)
class EpochTimeMinimize(_Growth):
    """Grows the batch until the time of an epoch no longer falls."""

    near: ClassVar[float] = 0.05  # of the first size's epoch
    needs: ClassVar[Needs] = Needs()

    def _assess(self, sample: Measurement, first: Measurement, multiple: int) -> _Assessment:
        ratio = first.images_per_s / sample.images_per_s
        return _Assessment(ratio, True, ratio, f"an epoch takes {ratio:.2f} times as long as with {first.batch}")


@dataclass(frozen=True)
class Throughput(Checked):
    """The size with the most images a second.

    Args:
        least_gain: a size with a smaller expected gain (a share) is not tried.

    Saves: most of an exhaustive sweep's time; see the Note in size_search.py.
    Costs: six steps each of four to ten sizes, and as many more of sizes whose order is uncertain.
    Maths: a step takes a + c * b seconds between cliffs. A smaller size that loses at most half a percent to a larger
        one is chosen.
    """

    least_gain: _Gain = 0.02
    needs: ClassVar[Needs] = Needs(brief=True)

    def search(self, tries: SizeSearch) -> BatchSizeResult:
        best, in_time = search_sizes(tries, lambda batch, step_s: batch / step_s, least_gain=self.least_gain)
        return tries.result(best.batch, _most(best, tries), in_time=in_time)


@dataclass(frozen=True)
class TimeToTarget(Checked):
    """The size that reaches the target soonest: images a second, divided by the number of images to the target.

    Args:
        epochs: (batch, epochs to the target) of at least two sizes, the smallest first, such as the points of a
            recipe. Between them epochs are interpolated along the logarithm of the batch; sizes outside are not tried.
            Empty: epochs follow from the gradient noise scale, measured at the timed steps.
        least_gain: a size with a smaller expected gain (a share) is not tried.

    Maths: an image at batch B is worth (phi + B0) / (phi + B) of one at B0, with the noise scale phi; so epochs grow
        like phi + B. The scale is the median of the later half of the estimates. It grows during training, so the
        chosen size is rather too small than too large. If it is unknown, all images are worth the same.
    Ref: McCandlish et al. 2018 (arXiv 1812.06162); the product: Pollux, Qiao et al. 2021 (arXiv 2008.12260).
    """

    epochs: tuple[tuple[int, float], ...] = ()
    least_gain: _Gain = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = [batch for batch, _ in self.epochs]
        good = sizes == sorted(set(sizes)) and all(b >= 1 and 0 < e < math.inf for b, e in self.epochs)
        if self.epochs and (len(sizes) < 2 or not good):
            wanted = "at least two pairs (batch, epochs), the smallest batch first, all above 0"
            raise InputError(f"epochs={self.epochs}: {wanted}")

    @property
    def needs(self) -> Needs:
        """The noise scale, unless the epochs are known."""
        return Needs(noise=not self.epochs, brief=True)

    def search(self, tries: SizeSearch) -> BatchSizeResult:
        if self.epochs:
            (smallest, _), *_, (largest, _) = self.epochs
            tries = replace(tries, least=max(tries.least, smallest), most=min(tries.most, largest))

        def scale() -> float | None:
            """The latest noise scale, which is estimated from all measurements up to it."""
            return next((s.noise for s in reversed(tries.samples) if s.noise is not None), None)

        def epochs(batch: int) -> float:
            return self.epochs_at(batch, tries.start, scale())

        best, in_time = search_sizes(tries, lambda b, step_s: b / step_s / epochs(b), least_gain=self.least_gain)
        rate, count, noise, longer = f"{best.images_per_s:,.0f} images/s", len(tries.good), scale(), epochs(best.batch)
        if self.epochs:
            seconds = longer * tries.images / best.images_per_s
            why = f"{rate} and {longer:.1f} epochs make {seconds:,.0f} s, the least of {count} sizes"
        elif noise is None:
            why = f"{_most(best, tries)}; the gradient noise scale is unknown, so all images count the same"
        else:
            epochs_of = f"{longer:.2f} times the epochs of batch {tries.start}"
            why = f"{rate} at {epochs_of} (gradient noise scale {noise:,.0f} images), the best of {count} sizes"
        return tries.result(best.batch, why, epochs=epochs, in_time=in_time)

    def epochs_at(self, batch: int, start: int, scale: float | None) -> float:
        """Epochs to the target; without known epochs, relative to those of `start`, by the noise scale."""
        if not self.epochs:
            return (scale + batch) / (scale + start) if scale is not None else 1.0
        sizes, epochs = zip(*self.epochs, strict=True)
        return float(np.interp(math.log(batch), np.log(sizes), epochs))


def _most(best: Measurement, tries: SizeSearch) -> str:
    good = tries.good
    return f"{best.images_per_s:,.0f} images/s, the most of {len(good)} sizes from {good[0].batch} to {good[-1].batch}"
