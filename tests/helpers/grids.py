"""Grids of parameters: a few combinations for every run, the full product for the exhaustive one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def covering(*axes: Sequence[Any], together: int = 2) -> list[Any]:
    """The product of the axes as pytest parameters; what a covering array does not need is marked `exhaustive`.

    Args:
        axes: the values of each parameter.
        together: 2: every pair of values of two axes is in the fast run; 1: every value is.
    """
    product = list(itertools.product(*(range(len(axis)) for axis in axes)))

    def tuples(row: tuple[int, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(row), together))

    missing = set().union(*map(tuples, product))
    kept = set()
    while missing:
        best = max(product, key=lambda row: len(tuples(row) & missing))
        kept.add(best)
        missing -= tuples(best)
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, row, strict=True)),
            marks=[] if row in kept else [pytest.mark.exhaustive],
        )
        for row in product
    ]
