"""The search on planted curves whose steps scatter by 2 %, over many seeds, beside an exhaustive sweep."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from helpers.planted import CURVES, Planted
from kasoku.tune.measurement import BRIEF, STEPS, Measurement
from kasoku.tune.strategies import Throughput, best_of, doubtful, errors_of

SEEDS, JITTER, MOST = 200, 0.02, 512

MORE: dict[str, Callable[[int], float]] = {
    "a cliff at 60 %": lambda b: (30.0 + b) * (1.15 if b > 307 else 1.0),
    "a cliff at 60 %, fewer launches": lambda b: (10.0 + b) * (1.3 if b > 307 else 1.0),
    "a cliff at 40": lambda b: (6.0 + b) * (1.5 if b > 40 else 1.0),
    "a cliff at 150": lambda b: (15.0 + b) * (1.25 if b > 150 else 1.0),
    "a cliff at 450": lambda b: (40.0 + b) * (1.2 if b > 450 else 1.0),
    "launches as long as 100 images": lambda b: max(100.0, float(b)),
    "slower and slower": lambda b: 20.0 + b + b * b / 1500,
}


OFTEN = {"a line", "a cliff at 300", "tiles of 32", "slower and slower"}
EVERY = [name if name in OFTEN else pytest.param(name, marks=pytest.mark.exhaustive) for name in CURVES | MORE]


def rate(batch: int, step_s: float) -> float:
    return batch / step_s


def sample(batch: int, images_per_s: float, error: float, steps: int = STEPS) -> Measurement:
    step_s = batch / images_per_s
    return Measurement(batch, step_s, step_s * (1 - 2 * error), step_s * (1 + 2 * error), steps=steps)


@pytest.mark.parametrize("name", EVERY)
def test_19_of_20_searches_lose_3_percent_in_a_quarter_of_a_sweep(name: str):
    curve = (CURVES | MORE)[name]
    lost, shares = [], []
    for seed in range(SEEDS):
        device = Planted(curve, jitter=JITTER, seed=seed, brief=True)
        found = Throughput().search(device.tries(most=MOST))
        sizes, sweep_s = device.sweep(MOST)
        lost.append(curve(found.batch) / found.batch / min(curve(b) / b for b in sizes))
        shares.append(device.clock.now_s / sweep_s)
    near = sum(one <= 1.03 for one in lost)
    assert near >= 0.95 * SEEDS, f"{near} of {SEEDS}, the worst {max(lost):.3f}"
    assert sorted(shares)[int(0.95 * SEEDS)] <= 0.25, f"the longest {max(shares):.3f}"


@pytest.mark.parametrize("name", ["a line", "the input alone", "tiles of 32"])
def test_where_steps_halt_a_search_takes_at_most_half_a_sweep(name: str):
    curve, shares = CURVES[name], []
    for seed in range(100):
        device = Planted(curve, jitter=4 * JITTER, halts=0.2, seed=seed, brief=True)
        Throughput().search(device.tries(most=MOST))
        shares.append(device.clock.now_s / device.sweep(MOST)[1])
    assert sorted(shares)[95] <= 0.5, f"the longest {max(shares):.3f}"


def test_a_smaller_size_is_taken_where_it_loses_half_a_percent_at_most():
    assert best_of([sample(8, 99.6, 0.0), sample(16, 100, 0.0)], rate).batch == 8
    assert best_of([sample(8, 99.2, 0.0), sample(16, 100, 0.0)], rate).batch == 16


def test_what_may_still_win_is_looked_at_again_and_what_cannot_is_not():
    far = [sample(8, 90, 0.01, BRIEF), sample(16, 100, 0.01, BRIEF)]
    assert doubtful(far, rate, 0.02) is None, "10 % at 1.4 % of error"
    near = [sample(8, 98, 0.02, BRIEF), sample(16, 100, 0.02, BRIEF)]
    assert doubtful(near, rate, 0.02) == 8, "of two known alike the smaller one: it costs less"
    assert doubtful([sample(8, 98, 0.02, 2 * BRIEF), near[1]], rate, 0.02) == 16, "the one looked at less"
    assert doubtful([sample(8, 98, 0.02), sample(16, 100, 0.02)], rate, 0.02) is None, "both are measured in full"


def test_a_spread_that_is_small_by_chance_is_not_believed():
    errors = errors_of([sample(8, 90, 0.01, BRIEF), sample(16, 95, 0.0, BRIEF), sample(32, 99, 0.012, BRIEF)])
    assert errors[16] == pytest.approx(0.01)
    assert errors[32] == pytest.approx(0.012)
