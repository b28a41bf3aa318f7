"""When a setting is chosen again: after drift, not after noise; and what becomes of the change."""

import json
import random

import pytest

from kasoku.core.retuning import Retuner

HOUR = 1800  # windows of 20 steps of 0.1 s


def settled(step_s: float = 0.1) -> Retuner:
    """A retuner that has seen a quiet link and quiet computing."""
    retuner = Retuner("buckets")
    assert [retuner.check([1.0, 0.5], step_s) for _ in range(10)] == [""] * 10
    return retuner


def retuned(retuner: Retuner, transfer_s: float, step_s: float = 0.1) -> int:
    """Windows until the setting is chosen again."""
    return next(n for n in range(1, 200) if retuner.check([1.0, transfer_s], step_s) == "retune")


@pytest.mark.parametrize("transfer_s", [0.58, 1.0, 0.43, 0.25])
def test_drift_is_seen_after_two_windows(transfer_s: float) -> None:
    assert retuned(settled(), transfer_s) == 2


@pytest.mark.parametrize("windows", [[0.57] * 50, [0.44] * 50, [1.0, 0.5] * 25, [1.0, 0.2] * 25])
def test_less_than_15_percent_and_single_windows_are_no_drift(windows: list[float]) -> None:
    retuner = settled()
    assert {retuner.check([1.0, transfer_s], 0.1) for transfer_s in windows} == {""}


def test_a_change_that_brought_something_stays() -> None:
    retuner = settled()
    retuned(retuner, 1.0, 0.2)
    retuner.changed("3 buckets instead of 7")
    assert [retuner.check([1.0, 1.0], step_s) for step_s in (0.5, 0.19)] == ["", "keep"]
    assert retuner.line == "a step takes 190.0 ms instead of 200.0: the new buckets stay"
    expected = {"what": "3 buckets instead of 7", "window": 12, "before_ms": 200.0, "after_ms": 190.0, "kept": True}
    assert retuner.changes == [expected]
    assert [retuner.check([1.0, 1.0], 0.3) for _ in range(50)] == [""] * 50, "the new state is the reference"
    assert retuned(retuner, 0.5) == 2, "the link is as it was"


def test_a_change_that_brought_less_than_2_percent_is_taken_back() -> None:
    retuner = settled()
    retuned(retuner, 1.0, 0.2)
    retuner.changed("3 buckets instead of 7")
    assert [retuner.check([1.0, 1.0], step_s) for step_s in (0.1, 0.197)] == ["", "undo"]
    assert retuner.line == "a step takes 197.0 ms instead of 200.0: the old buckets are back"
    assert retuner.changes[-1]["kept"] is False
    assert [retuner.check([1.0, 1.0], 0.2) for _ in range(50)] == [""] * 50


def test_a_change_is_not_judged_once_its_state_is_over() -> None:
    retuner = settled()
    retuned(retuner, 1.0, 0.2)
    retuner.changed("3 buckets instead of 7")
    assert [retuner.check([1.0, transfer_s], 0.1) for transfer_s in (1.0, 0.5, 0.5)] == ["", "", "retune"]
    assert retuner.changes[-1]["kept"] is None
    retuner.changed("7 buckets instead of 3")
    assert [retuner.check([1.0, 0.5], 0.09) for _ in range(2)] == ["", "keep"]


def test_fruitless_choices_become_rare_until_one_stays() -> None:
    retuner, waited = settled(), []
    for k in range(9):
        waited.append(retuned(retuner, 1.0 if k % 2 == 0 else 0.5))
        retuner.changed("")
        retuner.check([1.0, 1.0 if k % 2 == 0 else 0.5], 0.1)  # the third of the reference
    assert waited == [2, 2, 2, 3, 7, 15, 31, 63, 63]
    retuned(retuner, 0.5)
    retuner.changed("3 buckets instead of 7")
    assert [retuner.check([1.0, 0.5], 0.05) for _ in range(2)] == ["", "keep"]
    assert retuned(retuner, 1.0) == 2


@pytest.mark.parametrize("seed", range(20))
def test_an_hour_of_10_percent_noise_makes_no_change(seed: int) -> None:
    rng, retuner = random.Random(seed), Retuner("buckets")
    for _ in range(HOUR):
        assert not retuner.check([rng.uniform(0.9, 1.1), 0.5 * rng.uniform(0.9, 1.1)], 0.1 * rng.uniform(0.9, 1.1))


@pytest.mark.parametrize("seed", range(20))
def test_an_hour_of_heavy_tailed_noise_makes_few_choices(seed: int) -> None:
    """One window in 20 takes up to several times as long; each choice is taken and judged by steps as noisy."""
    rng, retuner, choices = random.Random(seed), Retuner("buckets"), 0
    for _ in range(HOUR):
        measured = [x * rng.gauss(1, 0.05) * (rng.paretovariate(1) if rng.random() < 0.05 else 1) for x in (1.0, 0.5)]
        if retuner.check(measured, 0.1 * rng.gauss(1, 0.02)) == "retune":
            choices += 1
            retuner.changed("3 buckets instead of 7")
    assert choices <= 12


def test_a_resumed_retuner_goes_on_as_if_nothing_had_happened() -> None:
    def run(stops: int | None) -> tuple[list[str], Retuner]:
        rng, retuner, said = random.Random(0), Retuner("buckets"), []
        for window in range(80):
            transfer_s = 0.5 if window // 10 % 2 else 1.0
            said.append(retuner.check([1.0, transfer_s * rng.gauss(1, 0.02)], 0.1 * rng.gauss(1, 0.05)))
            if said[-1] == "retune":
                retuner.changed("other buckets" if rng.random() < 0.5 else "")
            if window == stops:
                state = json.loads(json.dumps(retuner.state_dict()))
                retuner = Retuner("")
                retuner.load_state_dict(state)
        return said, retuner

    whole = run(None)
    assert {"", "retune", "undo"} <= set(whole[0])
    assert [run(stops) for stops in range(80)] == [whole] * 80
