"""The slowest of many: against what is known of the normal law."""

import pytest

from kasoku.simulate.step import slowest

MAXIMA = {2: 0.56419, 8: 1.42360, 64: 2.34373, 2048: 3.44180}  # expected maximum of n standard normals


@pytest.mark.parametrize("ranks", MAXIMA)
def test_the_slowest_of_many_is_the_maximum_of_the_law(ranks: int) -> None:
    spread = 1e-4  # so small that the factor is 1 + spread z
    assert slowest(spread, ranks) == pytest.approx(1 + spread * MAXIMA[ranks], abs=2e-7)


def test_equal_ranks_wait_for_nobody() -> None:
    assert slowest(0.0, 4096) == 1.0
