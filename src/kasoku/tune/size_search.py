"""Searches the best size on a smooth curve with cliffs, with few measurements, each where most can be gained.

Note: bounds within a gap. Between two measured sizes, a step takes at least the time on the line through the smaller of
them and a size below it. A cliff within the gap does not change that: the best size is then just below the cliff. If
the rate does not fall across the gap, a step also takes at least the time on the line through the larger size and a
size above it: on a straight line nothing in between is better, near a bend it may be. Lines go through sizes as far
apart as the gap is wide, if there are such, since close sizes determine a slope badly. Above the largest size, the
slope is that of a line a + c * b through the last three. Gaps with too little possible gain are not searched; the gap
with the most is next: it is halved, and above the largest size the search leaps, but not beyond the size at which the
line has almost its highest rate.

Note: no more steps than a decision needs. The first measurement of a size is brief. When no gap is left, the best size
and the one that may exceed it by most are measured again in turns, so that other load on the machine affects both. This
ends when no size may exceed the best by much more than `least_gain`, when all such sizes have all their steps, or when
it has taken as long as the first measurements (for steps that stall at times). A spread that is small by chance is not
trusted: every size has at least the typical spread.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence

from kasoku.tune.measurement import STEPS, Measurement, SizeSearch

Worth = Callable[[int, float], float]  # (batch, step_s) -> the more the better
_LEAP = 4  # the largest factor to the next size above
_LINE = 3  # sizes of the line above the largest size
_POINTS = 32  # of a gap at which gains are computed
_SAME = 0.005  # the loss at which a smaller size is still preferred
_SETTLED = 1.25  # times the least gain: the search is settled when no other size may gain more
_SURE = 2  # standard errors
_AGAIN = 1.0  # time for repeated measurements, as a multiple of that for first ones


def slope(samples: Sequence[Measurement]) -> float:
    """The seconds that an image adds to a step, from at least two sizes.

    Ref: Theil 1950, Sen 1968: the median of the slopes of all pairs.
    """
    return statistics.median(_chord(left, right) for left, right in itertools.combinations(samples, 2))


def best_of(good: Sequence[Measurement], worth: Worth) -> Measurement:
    """The smallest of the sizes that lose at most half a percent to the best; `good` is in ascending order."""
    least = (1 - _SAME) * max(worth(s.batch, s.step_s) for s in good)
    return next(s for s in good if worth(s.batch, s.step_s) >= least)


def search_sizes(tries: SizeSearch, worth: Worth, *, least_gain: float) -> tuple[Measurement, bool]:
    """Measures sizes until no other may gain `least_gain` over the best; returns the best, and whether time sufficed.

    `worth` may depend on all measurements so far.
    """
    batch: int | None = tries.least
    first_s = again_s = 0.0
    while batch is not None:
        known = any(sample.batch == batch for sample in tries.samples)
        began_s = tries.clock.now()
        if tries.take(batch) is None:
            break
        took_s = tries.clock.now() - began_s
        first_s, again_s = (first_s, again_s + took_s) if known else (first_s + took_s, again_s)
        good = tries.good
        most = max(worth(s.batch, s.step_s) for s in good)
        gaps = [_between(good, i, worth, tries.multiple) for i in range(len(good) - 1)]
        gaps.append(_above(tries, good, worth, least_gain))
        value, batch = max((gap for gap in gaps if gap), default=(-math.inf, None))
        if value <= most * (1 + least_gain):
            batch = None
        if batch is None and again_s < _AGAIN * first_s:
            batch = doubtful(good, worth, _SETTLED * least_gain)
    return best_of(tries.good, worth), batch is None


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


def _between(good: Sequence[Measurement], i: int, worth: Worth, multiple: int) -> tuple[float, int] | None:
    """The possible worth in the gap above the i-th size, and the size to measure there; None for a narrow gap."""
    left, right = good[i], good[i + 1]
    middle = _rounded(math.sqrt(left.batch * right.batch), left.batch, right.batch, multiple)
    if middle is None:
        return None
    width, chord = right.batch - left.batch, _chord(left, right)
    noise = _SURE * math.hypot(*(errors_of(good)[s.batch] for s in (left, right)))
    fell = worth(right.batch, right.step_s) < worth(left.batch, left.step_s) * (1 - noise)
    below = [s for s in good[:i] if left.batch - s.batch >= width] or good[:1]
    above = [s for s in good[i + 2 :] if s.batch - right.batch >= width] or good[-1:]
    # seconds of an image by the line below the gap, and by the one above; nothing below: half of a step may not grow
    before = _chord(below[-1], left) if i else left.step_s / left.batch / 2 if fell else chord
    after = math.inf if fell or i + 2 >= len(good) else max(chord, _chord(right, above[0]))
    an_image_s = max(0.0, min(before, chord))
    stride = max(1, width // _grains(multiple)[-1] // _POINTS) * _grains(multiple)[-1]
    sizes = range(left.batch + stride, right.batch, stride)
    worths = {
        b: worth(b, max(left.step_s + an_image_s * (b - left.batch), right.step_s - after * (right.batch - b)))
        for b in sizes
    }
    top = max(worths, key=lambda b: worths[b], default=middle)
    inside = top + stride < right.batch and _rounded(top, left.batch, right.batch, multiple)
    return worths.get(top, -math.inf), inside or middle


def _above(tries: SizeSearch, good: Sequence[Measurement], worth: Worth, least_gain: float) -> tuple[float, int] | None:
    """The possible worth above the largest size that ran, and the size to measure there."""
    last, most = good[-1], tries.most
    if last.batch >= most:
        return None
    value, reach = math.inf, most
    if len(good) > 1:
        an_image_s = max(0.0, slope(good[-_LINE:]))
        growth = (most / last.batch) ** (1 / _POINTS)
        sizes = sorted({min(most, math.ceil(last.batch * growth**k)) for k in range(1, _POINTS + 1)})
        worths = [worth(b, last.step_s + an_image_s * (b - last.batch)) for b in sizes]
        value = max(worths)
        reach = next(b for b, w in zip(sizes, worths, strict=True) if w >= value * (1 - least_gain / 2))
    if tries.failed is not None:  # halves the gap to the size that failed
        reach = min(reach, (last.batch + tries.failed) // 2)
    above = _rounded(min(reach, _LEAP * last.batch, most), last.batch, most + 1, tries.multiple)
    return (value, above or most) if above or tries.failed is None else None


def _chord(left: Measurement, right: Measurement) -> float:
    return (right.step_s - left.step_s) / (right.batch - left.batch)


def _grains(multiple: int) -> list[int]:
    """The multiples to which sizes are rounded, the coarsest first: 32, 16 and 8, if `multiple` permits."""
    return [math.lcm(multiple, 32), math.lcm(multiple, 16), multiple * math.ceil(8 / multiple)]


def _rounded(batch: float, above: int, below: int, multiple: int) -> int | None:
    """A size near `batch` between the two, rounded to the coarsest grain that has one there."""
    sizes = (round(batch / grain) * grain for grain in _grains(multiple))
    return next((size for size in sizes if above < size < below), None)
