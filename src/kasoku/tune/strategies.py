"""Strategies of the batch-size search. Each depends on the measurements alone, so all ranks agree.

Note: gaps. The search leaps upwards as long as a larger size may gain, but not beyond the size at which the rate would
hardly grow. Then the gaps on both sides of the best size are halved, as long as one of them may gain more than the
error of the best size, taken as 1 to 1.5 times `least_gain`. Within a gap, a step takes at least the time on the line
through the smaller of its two sizes and one below that. With a cliff within it, the best size is just below the cliff.

Note: no more steps than a decision needs. The first measurement of a size is brief. When no gap is left, the best size
and the one that may exceed it by most are measured again in turns, so that other load affects both. This ends when no
size may exceed the best by much more than `least_gain`, when all such sizes have all their steps, or when it has taken
half as long as the first measurements. Every size has at least the typical spread.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Annotated, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from kasoku.core import Checked, InputError, Range
from kasoku.tune.measurement import STEPS, BatchSizeResult, Measurement, Needs, SizeSearch

Worth = Callable[[int, float], float]  # (batch, step_s) -> the more the better
_LEAP = 4  # the largest factor to the next size above
_POINTS = 32  # of a gap at which gains are computed
_SAME = 0.005  # the loss at which a smaller size is still preferred
_MOST_ERROR = 1.5  # times the least gain: a larger error of the best size counts as this
_SETTLED = 1.25  # times the least gain: the search is settled when no other size may gain more
_SURE = 2  # standard errors
_AGAIN = 0.5  # time for repeated measurements, as a multiple of that for first ones
_CHECK_EVERY, _MAX_LOOPS = 5, 100  # loops between two tests of convergence; in all
_MAX_STEP = 10  # multiples by which a size grows at most
_COST = 1.5  # time of an image in a branch, of which the losses are a part, over that in a step
_CRITICAL = 1.1  # times the images of the smallest branch: what the critical batch needs at most
_Gain = Annotated[float, Range("a share such as 0.02", above=0, below=1)]


def best_of(good: Sequence[Measurement], worth: Worth) -> Measurement:
    """The smallest of the sizes that lose at most half a percent to the best; `good` is in ascending order."""
    least = (1 - _SAME) * max(worth(s.batch, s.step_s) for s in good)
    return next(s for s in good if worth(s.batch, s.step_s) >= least)


def search_sizes(tries: SizeSearch, worth: Worth, *, least_gain: float) -> tuple[Measurement, bool]:
    """Measures sizes until no other may gain `least_gain` over the best; returns it, and whether time sufficed."""
    batch: int | None = tries.least
    first_s, again_s = sum(s.steps * s.step_s for s in tries.samples if not s.failed), 0.0
    while batch is not None:
        known = any(sample.batch == batch for sample in tries.samples)
        began_s = tries.clock.now()
        if tries.take(batch) is None:
            break
        took_s = tries.clock.now() - began_s
        first_s, again_s = (first_s, again_s + took_s) if known else (first_s + took_s, again_s)
        good = tries.good
        most, error = max((worth(s.batch, s.step_s), errors_of(good)[s.batch]) for s in good)
        value, batch = max(_gaps(tries, good, worth, least_gain), default=(-math.inf, None))
        if value <= most * (1 + max(least_gain, min(error, _MOST_ERROR * least_gain))):
            batch = None
        if batch is None and again_s < _AGAIN * first_s:
            batch = doubtful(good, worth, _SETTLED * least_gain)
    return best_of(tries.good, worth), batch is None


def _gaps(
    tries: SizeSearch, good: Sequence[Measurement], worth: Worth, least_gain: float
) -> Iterator[tuple[float, int]]:
    """The possible worth, and the size to measure, in the gaps beside the best size and above the largest."""
    best = good.index(max(good, key=lambda s: worth(s.batch, s.step_s)))
    for i in {max(0, best - 1), best, len(good) - 1}:
        left, right = good[i], good[i + 1] if i + 1 < len(good) else None
        end = right.batch if right else tries.most + 1
        # the line through a size as far below as the gap is wide, if there is one: close sizes determine a slope badly
        below = [s for s in good[:i] if left.batch - s.batch >= end - left.batch] or good[:1]
        an_image_s = 0.0  # of the smallest size, if there may be a cliff above it
        if i or (right and worth(right.batch, right.step_s) > worth(left.batch, left.step_s)):
            start, stop = below[-1], left if i else good[1]
            an_image_s = max(0.0, (stop.step_s - start.step_s) / (stop.batch - start.batch))
        sizes = range(left.batch + 1, end, max(1, (end - left.batch) // _POINTS))
        worths = {b: worth(b, left.step_s + an_image_s * (b - left.batch)) for b in sizes}
        value = max(worths.values(), default=-math.inf)
        if right:
            middle = math.sqrt(left.batch * end)
        else:  # a leap, but not beyond the size at which the line has almost its highest worth
            reach = next((b for b, w in worths.items() if w >= value * (1 - least_gain / 2)), tries.most)
            middle = min(_LEAP * left.batch, reach, (left.batch + (tries.failed or math.inf)) / 2)
        batch = _rounded(middle, left.batch, end, tries.multiple)
        if batch is None and not right and tries.failed is None and left.batch < tries.most:
            batch = tries.most
        if batch is not None:
            yield value, batch


def doubtful(good: Sequence[Measurement], worth: Worth, much: float) -> int | None:
    """The size to measure again: the best, or one that may exceed it by `much` (a share); the one with fewer steps.

    None if no other size may, or all that may have all their steps.
    """
    best, errors = best_of(good, worth), errors_of(good)
    value = worth(best.batch, best.step_s)
    may: list[tuple[float, Measurement]] = []
    for sample in good:
        unsure = _SURE * math.hypot(errors[best.batch], errors[sample.batch])
        gain = worth(sample.batch, sample.step_s) / value - 1 + unsure
        if sample is not best and gain > much:
            may.append((gain, sample))
    for _, rival in sorted(may, key=lambda pair: -pair[0]):
        short = [s for s in (best, rival) if s.steps < STEPS]
        if short:
            return min(short, key=lambda s: (s.steps, s.batch)).batch
    return None


def errors_of(good: Sequence[Measurement]) -> dict[int, float]:
    """The error of each batch, as a share: the larger of its own and of the typical error of as many steps."""
    typical = statistics.median(s.error * math.sqrt(max(1, s.steps)) for s in good)
    return {s.batch: max(s.error, typical / math.sqrt(max(1, s.steps))) for s in good}


def _rounded(batch: float, above: int, below: int, multiple: int) -> int | None:
    """A size near `batch` between the two: a multiple of 32, else 16, else 8, as far as `multiple` permits."""
    grains = (math.lcm(multiple, 32), math.lcm(multiple, 16), multiple * math.ceil(8 / multiple))
    sizes = (round(batch / grain) * grain for grain in grains)
    return next((size for size in sizes if above < size < below), None)


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

    Saves: most of an exhaustive sweep's time; see the Notes of this file.
    Costs: five steps each of four to ten sizes, and half as many more of sizes whose order is uncertain.
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
            Empty: they follow from branches, short trainings from one state, in about half of the time at most.
        least_gain: a size with a smaller expected gain (a share) is not tried.
        scaling: how the rates of a branch follow its batch, as in a recipe: in proportion, or with its root.

    Maths: a size whose branch ends at the loss that the smallest one had after a share 1 / r of the images needs r
        times the epochs. r falls during training, so in a long one the chosen size is rather too small than too large.
    Ref: Merrill et al. 2025 (arXiv 2505.23971); the product: Pollux, Qiao et al. 2021 (arXiv 2008.12260).
    """

    epochs: tuple[tuple[int, float], ...] = ()
    least_gain: _Gain = 0.02
    scaling: Literal["linear", "sqrt", "legw"] = "linear"
    needs: ClassVar[Needs] = Needs(brief=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = [batch for batch, _ in self.epochs]
        good = sizes == sorted(set(sizes)) and all(b >= 1 and 0 < e < math.inf for b, e in self.epochs)
        if self.epochs and (len(sizes) < 2 or not good):
            wanted = "at least two pairs (batch, epochs), the smallest batch first, all above 0"
            raise InputError(f"epochs={self.epochs}: {wanted}")

    def search(self, tries: SizeSearch) -> BatchSizeResult:
        curve = self.epochs or _branched(tries, 1.0 if self.scaling == "linear" else 0.5)
        sizes, values = zip(*(curve or [(tries.least, 1.0), (tries.most, 1.0)]), strict=True)
        if tries.most < tries.least:
            _ = tries.good  # raises: no size fits
        tries = replace(tries, least=max(tries.least, sizes[0]), most=min(tries.most, sizes[-1]))
        logs = [*map(math.log, sizes)]

        def epochs(batch: int) -> float:
            return float(np.interp(math.log(batch), logs, values, left=math.inf, right=math.inf))

        best, in_time = search_sizes(tries, lambda b, step_s: b / step_s / epochs(b), least_gain=self.least_gain)
        rate, count, longer = f"{best.images_per_s:,.0f} images/s", len(tries.good), epochs(best.batch)
        if self.epochs:
            seconds = longer * tries.images / best.images_per_s
            why = f"{rate} and {longer:.1f} epochs make {seconds:,.0f} s, the least of {count} sizes"
        elif not curve:
            why = f"{_most(best, tries)}; without branches all images count the same"
        else:
            critical = max(batch for batch, ratio in curve if ratio <= _CRITICAL)
            epochs_of = f"{longer:.2f} times the epochs of batch {sizes[0]}"
            why = f"{rate} at {epochs_of} (critical batch {critical:,}), the best of {count} sizes"
        return tries.result(best.batch, why, epochs=epochs, in_time=in_time)


def _branched(tries: SizeSearch, power: float) -> tuple[tuple[int, float], ...]:
    """(batch, images to the same loss as a multiple of the smallest's) of branches from a quarter of `start` upwards.

    Empty where time, images or memory are short for two that learn. Rates follow the batch to `power`.
    """
    base = min(max(tries.start // 4 // tries.multiple * tries.multiple, tries.least), tries.most)
    first = tries.take(base)
    if first is None or first.failed:
        return ()
    stop_s = (tries.clock.now() + tries.until_s) / 2
    room_s = (stop_s - tries.clock.now()) / _COST / tries.ranks
    fits = {base * 2**k: min(tries.images, room_s * base / first.step_s / (2 + k)) for k in range(64)}  # and the trunk
    sizes = [size for size, images in fits.items() if size <= tries.most and 4 * size <= images]
    sizes = [*takewhile(lambda size: (sample := tries.take(size)) is not None and not sample.failed, sizes)]
    if len(sizes) < 2:
        return ()
    affordable = min(tries.images, room_s / sum(s.step_s / s.batch for s in tries.good))
    images = max(1, int(affordable // (4 * sizes[-1]))) * 4 * sizes[-1]  # each size makes whole steps in a quarter
    trunk = max(size for size in sizes if size <= max(base, tries.start))  # about the job's own batch
    falls, curve, start = np.zeros(5), list[tuple[int, float]](), math.nan
    for i, size in enumerate([trunk, *sizes]):
        rate, length = (size / tries.start) ** power, images if i else images // 2
        if tries.clock.now() > stop_s or not (losses := tries.branch(size, rate, length)):
            break
        if i == 0:
            start = losses[-1]
        elif not curve:
            falls[1:] = np.maximum.accumulate(start - np.array(losses))
        if falls[-1] > 0:
            quarters = float(np.interp(start - statistics.fmean(losses[2:]), falls, range(5)))  # nan where it diverged
            before = curve[-1][1] if curve else 0.5  # twice the batch needs no fewer images, and no more updates
            curve.append((size, min(2 * before, max(before, 1.0, 3.5 / max(0.01, quarters)))))
    return tuple(curve) if len(curve) > 1 else ()


def _most(best: Measurement, tries: SizeSearch) -> str:
    good = tries.good
    return f"{best.images_per_s:,.0f} images/s, the most of {len(good)} sizes from {good[0].batch} to {good[-1].batch}"
