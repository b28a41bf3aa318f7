"""Weak scaling: the same training over growing numbers of GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kasoku.core import InputError
from kasoku.simulate.cluster import Cluster
from kasoku.simulate.step import SimulatedStep


def sizes(
    cluster: Cluster, low: int, high: int, count: int = 60, *, fits: Callable[[int], bool] = lambda _: True
) -> list[int]:
    """Numbers of GPUs from low to high, evenly spaced in their logarithms, that fill their nodes and pass `fits`.

    Raises:
        InputError: for a range that the cluster does not hold.
    """
    if not 1 <= low <= high:
        raise InputError(f"sweep gpus={low}:{high}: from at least 1 up to more")
    if high > cluster.most:
        raise InputError(f"sweep gpus={low}:{high}: {cluster.name} has {cluster.most:,} GPUs: sweep up to these")
    each = cluster.node.gpus
    possible = [n for n in range(low, high + 1) if (n <= each or n % each == 0) and fits(n)]
    if not possible:
        raise InputError(f"gpus={low}:{high}: nodes of {each}: none of these numbers fills them and shares the batch")
    tries = count
    while True:  # rounding makes some of them equal
        wanted = [low * (high / low) ** (i / (tries - 1)) for i in range(tries)]
        numbers = sorted({min(possible, key=lambda n: abs(math.log(n / w))) for w in wanted})
        if len(numbers) >= min(count, len(possible)) or tries > 16 * count:
            return numbers
        tries *= 2


def efficiency(steps: Sequence[SimulatedStep]) -> list[float]:
    """Images/s of a GPU at each step, as a share of the first step's."""
    first = steps[0].images_per_s / steps[0].gpus
    return [step.images_per_s / step.gpus / first for step in steps]
