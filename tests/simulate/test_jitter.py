"""The slowest of many: against what is known of the normal law, and against draws."""

import math
import random

import pytest

from kasoku.simulate.jitter import Jitter

MAXIMA = {2: 0.56419, 8: 1.42360, 64: 2.34373, 2048: 3.44180}  # expected maximum of n standard normals


@pytest.mark.parametrize("ranks", MAXIMA)
def test_the_slowest_of_many_is_the_maximum_of_the_law(ranks: int) -> None:
    spread = 1e-4  # so small that the factor is 1 + spread z
    assert Jitter(spread).slowest(ranks) == pytest.approx(1 + spread * MAXIMA[ranks], abs=2e-7)


def test_stragglers_are_met_the_more_surely_the_more_ranks_there_are() -> None:
    jitter = Jitter(0.01, stragglers=0.01, slowed=1.5)
    rng = random.Random(0)

    def drawn(ranks: int) -> float:
        each = (math.exp(rng.gauss(0, 0.01)) * (1.5 if rng.random() < 0.01 else 1.0) for _ in range(ranks))
        return max(each)

    for ranks in (10, 200):
        mean = sum(drawn(ranks) for _ in range(2000)) / 2000
        assert jitter.slowest(ranks) == pytest.approx(mean, rel=0.015)
    assert jitter.slowest(1) == pytest.approx(math.exp(0.01**2 / 2) * 1.005, rel=1e-3)


def test_equal_ranks_wait_for_nobody() -> None:
    assert Jitter().slowest(4096) == 1.0
