"""The benchmark of document 002: what a search found is told from what it had when its time was over."""

import importlib
import sys
from pathlib import Path

import pytest

from kasoku.tune import BatchSizeResult, Measurement

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
batch_patterns = importlib.import_module("batch_patterns")
CONVERGED, LATE = "an epoch takes 0.40 times as long as with 4, converged in 3 loops", "time was over, the best so far"


def search(why: str, *loops: tuple[int, float]) -> object:
    """A search of these loops, (batch, images a second), that ends at the last."""
    samples = [Measurement(batch, step_s=batch / speed, utilisation=0.9) for batch, speed in loops]
    result = BatchSizeResult(samples[-1].batch, tuple(samples), why, 1.0, why == CONVERGED)
    return batch_patterns.Search(result, samples)


def figures(*searches: object) -> dict:
    name = "epoch_time"
    rounds = [batch_patterns.Round(sweep_s=1.0, searches={name: s}, over_best={name: 1.0}) for s in searches]
    return batch_patterns.of_strategy(name, rounds)


def test_only_a_search_that_converged_has_loops_and_a_last_use():
    loops = (4, 100.0), (6, 240.0), (9, 250.0)
    found = figures(search(CONVERGED, *loops), search(LATE, (4, 100.0), (6, 120.0)))
    assert (found["converged"], found["loops"], found["converged_batch"]) == (0.5, 2, 9)
    assert found["use_end"] == pytest.approx(90)
    assert found["settled"] == pytest.approx(6 / 9, abs=1e-4)
    none = figures(search(LATE, *loops))
    assert none["converged"] == 0
    assert none["loops"] is none["use_end"] is none["settled"] is none["converged_batch"] is None


def test_a_cliff_is_between_two_sizes_that_are_near():
    assert figures(search(CONVERGED, (4, 100.0), (6, 300.0), (60, 900.0)))["cliff"] is None
    found = figures(search(CONVERGED, (4, 100.0), (96, 1000.0), (106, 1700.0), (116, 1750.0)))
    assert found["cliff"] == pytest.approx(1000 / 1700, abs=1e-4)
