"""Tests whether one way to train is faster than another: a paired test over runs of equal seeds."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from kasoku.report.html import RunRecord

_MIN_PAIRS = 3
_MIN_EQUAL_PAIRS = 6  # from here on, equal signs alone decide: 2 / 2^6 < 0.05
# Two-sided 95 % of Student's t: for 1, 2, ... degrees of freedom.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)


def compare(first: Sequence[RunRecord], second: Sequence[RunRecord], *, names: tuple[str, str] = ("A", "B")) -> str:
    """Compares the second group with the first over the seeds that both have; returns a sentence with the figures.

    Compares the times to the target if all of these runs reached the same target, else the accuracies at the end.
    Several runs of one seed in one group count as one, by their mean.

    Maths: d_i = log(second_i / first_i), or the difference of accuracies; mean(d) +- t(n - 1) sd(d) / sqrt(n) is the
        95 % interval of a paired t test, and the test decides if it does not contain 0. If all d_i are equal
        (accuracies count whole images) the interval is a point; then signs decide, and at least 6 pairs are needed.
    Ref: Student 1908; Fisher 1935 (the signs).
    """
    seeds = sorted({run.seed for run in first} & {run.seed for run in second})
    verdict = f"{names[1]} against {names[0]}: undecided"
    if len(seeds) < _MIN_PAIRS:
        figures = f"{len(seeds)} pair{'' if len(seeds) == 1 else 's'} of equal seeds; at least {_MIN_PAIRS} are wanted"
        return f"{verdict}: {figures}"
    runs = [run for run in (*first, *second) if run.seed in seeds]
    in_time = runs[0].target > 0 and all(run.target == runs[0].target and run.time_to_target_s for run in runs)
    unfinished = sum(run.top1 is None for run in runs)
    if unfinished and not in_time:
        figures = f"{unfinished} of the {len(runs)} runs have no accuracy yet; let them end"
        return f"{verdict}: {figures}"

    def mean_of(group: Sequence[RunRecord], seed: int) -> float:
        return fmean((run.time_to_target_s if in_time else run.top1) or 0.0 for run in group if run.seed == seed)

    pairs = [(mean_of(first, seed), mean_of(second, seed)) for seed in seeds]
    mean, low, high = interval([math.log(b / a) if in_time else b - a for a, b in pairs])
    below, above = ("faster", "slower") if in_time else ("less accurate", "more accurate")
    word = below if high < 0 else above if low > 0 else ""
    if word and (high - low > 1e-9 * abs(mean) or len(seeds) >= _MIN_EQUAL_PAIRS):
        verdict = f"{names[1]} is {word} than {names[0]}"
    if in_time:
        mean, low, high = math.exp(mean), math.exp(low), math.exp(high)
        times = f"{mean:.3g} of its time to {100 * runs[0].target:.4g} %"
        figures = f"{times} (95 % interval {low:.3g} to {high:.3g}, {len(seeds)} seeds)"
    else:
        points = f"{100 * mean:+.2f} points of accuracy at the end"
        figures = f"{points} (95 % interval {100 * low:+.2f} to {100 * high:+.2f}, {len(seeds)} seeds; "
        figures += "not all reached one target, so their times do not compare)"
    return f"{verdict}: {figures}"


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of at least 2 values, and the ends of Student's 95 % interval around it."""
    mean, freedom = fmean(values), len(values) - 1
    # beyond the table to 0.2 %
    t95 = _T95[freedom - 1] if freedom <= len(_T95) else 1.96 + 2.4 / freedom + 2.6 / freedom**2
    half = t95 * stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half
