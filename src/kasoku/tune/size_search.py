"""Searches the best size on a smooth curve with cliffs, with few measurements: leaps upwards, then halves gaps.

Note: gaps. The search leaps upwards as long as a larger size may gain, but not beyond the size at which the rate would
hardly grow. Then the gaps on both sides of the best size are halved, as long as one of them may gain more than the
error of the best size. Within a gap, a step takes at least the time on the line through the smaller of its two sizes
and one below that. A cliff within the gap does not change that: the best size is then just below the cliff.

Note: no more steps than a decision needs. The first measurement of a size is brief. When no gap is left, the best size
and the one that may exceed it by most are measured again in turns, so that other load on the machine affects both. This
ends when no size may exceed the best by much more than `least_gain`, when all such sizes have all their steps, or when
it has taken as long as the first measurements (for steps that stall at times). A spread that is small by chance is not
trusted: every size has at least the typical spread.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence

from kasoku.tune.measurement import STEPS, Measurement, SizeSearch

Worth = Callable[[int, float], float]  # (batch, step_s) -> the more the better
_LEAP = 4  # the largest factor to the next size above
_POINTS = 32  # of a gap at which gains are computed
_SAME = 0.005  # the loss at which a smaller size is still preferred
_SETTLED = 1.25  # times the least gain: the search is settled when no other size may gain more
_SURE = 2  # standard errors
_AGAIN = 1.0  # time for repeated measurements, as a multiple of that for first ones


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
        most, error = max((worth(s.batch, s.step_s), errors_of(good)[s.batch]) for s in good)
        value, batch = max(_gaps(tries, good, worth, least_gain), default=(-math.inf, None))
        if value <= most * (1 + max(least_gain, error)):
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
            an_image_s = max(0.0, _chord(below[-1], left if i else good[1]))
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


def _chord(left: Measurement, right: Measurement) -> float:
    return (right.step_s - left.step_s) / (right.batch - left.batch)


def _rounded(batch: float, above: int, below: int, multiple: int) -> int | None:
    """A size near `batch` between the two: a multiple of 32, else 16, else 8, as far as `multiple` permits."""
    grains = (math.lcm(multiple, 32), math.lcm(multiple, 16), multiple * math.ceil(8 / multiple))
    sizes = (round(batch / grain) * grain for grain in grains)
    return next((size for size in sizes if above < size < below), None)
