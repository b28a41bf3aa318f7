"""Tests whether one way to train is faster than another: a paired test over runs of equal seeds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

_MIN_PAIRS = 3
_MIN_EQUAL_PAIRS = 6  # from here on, equal signs alone decide: 2 / 2^6 < 0.05
# Two-sided 95 % of Student's t: for 1, 2, ... degrees of freedom.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of a run: seconds to its target, or None; accuracy at the end from 0 to 1, or None."""

    seed: int
    target: float
    time_to_target_s: float | None
    top1: float | None


@dataclass(frozen=True)
class Comparison:
    """The second group of runs, compared with the first.

    Attributes:
        word: "faster", "slower", "more accurate", "less accurate" or "undecided".
        line: a sentence with the figures.
        pairs: seeds that both groups have.
        estimate, low, high: with their 95 % interval: the second's time over the first's, or the difference of
            accuracies (second minus first); nan with too few pairs.
    """

    word: str
    line: str
    pairs: int
    estimate: float = math.nan
    low: float = math.nan
    high: float = math.nan


def compare(
    first: Sequence[RunOutcome], second: Sequence[RunOutcome], *, names: tuple[str, str] = ("A", "B")
) -> Comparison:
    """Compares the second group with the first over the seeds that both have.

    Compares the times to the target if all of these runs reached the same target, else the accuracies at the end.
    Several runs of one seed in one group count as one, by their mean.

    Maths: d_i = log(second_i / first_i), or the difference of accuracies; mean(d) +- t(n - 1) sd(d) / sqrt(n) is the
        95 % interval of a paired t test, and the test decides if it does not contain 0. If all d_i are equal
        (accuracies count whole images) the interval is a point; then signs decide, and at least 6 pairs are needed.
    Ref: Student 1908; Fisher 1935 (the signs).
    """
    a, b = _by_seed(first), _by_seed(second)
    seeds = sorted(a.keys() & b.keys())
    runs = [run for seed in seeds for run in (*a[seed], *b[seed])]
    if len(seeds) < _MIN_PAIRS:
        plural = "" if len(seeds) == 1 else "s"
        figures = f"{len(seeds)} pair{plural} of equal seeds; at least {_MIN_PAIRS} are wanted"
        return Comparison("undecided", _sentence("undecided", names, figures), len(seeds))
    targets = {run.target for run in runs}
    if len(targets) == 1 and min(targets) > 0 and all(run.time_to_target_s for run in runs):
        logs = [math.log(_time(b[seed]) / _time(a[seed])) for seed in seeds]
        return _by_time(logs, targets.pop(), names)
    if any(run.top1 is None for run in runs):
        unfinished = sum(run.top1 is None for run in runs)
        figures = f"{unfinished} of the {len(runs)} runs have no accuracy yet; let them end"
        return Comparison("undecided", _sentence("undecided", names, figures), len(seeds))
    return _by_accuracy([_accuracy(b[seed]) - _accuracy(a[seed]) for seed in seeds], names)


def _by_time(logs: Sequence[float], target: float, names: tuple[str, str]) -> Comparison:
    mean, low, high = (math.exp(x) for x in interval(logs))
    word = _decided(logs, "faster", "slower")
    figures = (
        f"{mean:.3g} of its time to {100 * target:.4g} % (95 % interval {low:.3g} to {high:.3g}, {len(logs)} seeds)"
    )
    return Comparison(word, _sentence(word, names, figures), len(logs), mean, low, high)


def _by_accuracy(differences: Sequence[float], names: tuple[str, str]) -> Comparison:
    mean, low, high = interval(differences)
    word = _decided(differences, "less accurate", "more accurate")
    points = f"{100 * mean:+.2f} points of accuracy at the end (95 % interval {100 * low:+.2f} to {100 * high:+.2f}"
    figures = f"{points}, {len(differences)} seeds; not all reached one target, so their times do not compare)"
    return Comparison(word, _sentence(word, names, figures), len(differences), mean, low, high)


def _sentence(word: str, names: tuple[str, str], figures: str) -> str:
    undecided = f"{names[1]} against {names[0]}: undecided"
    return f"{undecided if word == 'undecided' else f'{names[1]} is {word} than {names[0]}'}: {figures}"


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of at least 2 values, and the ends of Student's 95 % interval around it."""
    mean = fmean(values)
    half = _t95(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def _decided(values: Sequence[float], below: str, above: str) -> str:
    mean, low, high = interval(values)
    if high - low <= 1e-9 * abs(mean) and len(values) < _MIN_EQUAL_PAIRS:
        return "undecided"
    return below if high < 0 else above if low > 0 else "undecided"


def _t95(freedom: int) -> float:
    """Two-sided 95 % of Student's t; beyond the table to 0.2 %."""
    return _T95[freedom - 1] if freedom <= len(_T95) else 1.96 + 2.4 / freedom + 2.6 / freedom**2


def _by_seed(runs: Sequence[RunOutcome]) -> dict[int, list[RunOutcome]]:
    by_seed: defaultdict[int, list[RunOutcome]] = defaultdict(list)
    for run in runs:
        by_seed[run.seed].append(run)
    return dict(by_seed)


def _time(runs: Sequence[RunOutcome]) -> float:
    return fmean(run.time_to_target_s or 0.0 for run in runs)


def _accuracy(runs: Sequence[RunOutcome]) -> float:
    return fmean(run.top1 or 0.0 for run in runs)
