"""When a setting is chosen again: after drift, not after noise; and what becomes of the change."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import contracts
from helpers.virtual_comm import VirtualClock
from kasoku.core import Adaptive, Solo

HOUR = 2400  # windows of 15 steps of 0.1 s
QUIET = (1.0, 0.5)


class Gears(Adaptive):
    """A setting that counts its choices; `found` says what a choice finds."""

    name = "gears"

    def __init__(self, found: Callable[[], str] = lambda: "3 instead of 7") -> None:
        self.clock, self.gear, self.found, self.choices = VirtualClock(), 7, found, 0
        super().__init__(contracts.make(comm=Solo(self.clock)), torch.device("cpu"))
        self.now: Sequence[float] = QUIET

    def values(self, step_s: float, owns: Sequence[float]) -> Sequence[float]:
        return self.now

    def choose(self, owns: Sequence[float]) -> None:
        self.choices += 1
        what = self.found()
        before, self.gear = self.gear, 3 if what else self.gear
        self.chosen(what, before)

    def take(self, setting: Any) -> None:
        self.gear = setting

    def window(self, values: Sequence[float] = QUIET, step_s: float = 0.1) -> int:
        """15 steps; the choices so far."""
        self.now = values
        for _ in range(15):
            self.clock.seconds += step_s
            self.job.steps += 1
            self.end_step()
        return self.choices


def settled(found: Callable[[], str] = lambda: "3 instead of 7") -> Gears:
    """Gears that have seen three quiet windows."""
    gears = Gears(found)
    assert [gears.window() for _ in range(5)] == [0] * 5
    return gears


@pytest.mark.parametrize("value", [0.58, 1.0, 0.43, 0.25])
def test_drift_is_seen_after_two_windows(value: float) -> None:
    gears = settled()
    assert [gears.window((1.0, value)) for _ in range(2)] == [0, 1]


@pytest.mark.parametrize("values", [[0.57] * 50, [0.44] * 50, [1.0, 0.5] * 25, [1.0, 0.2] * 25])
def test_less_than_15_percent_and_single_windows_are_no_drift(values: list[float]) -> None:
    gears = settled()
    assert [gears.window((1.0, value)) for value in values] == [0] * 50


def test_a_change_that_brought_something_stays(capsys: pytest.CaptureFixture[str]) -> None:
    gears = settled()
    assert [gears.window((1.0, 1.0), step_s) for step_s in (0.2, 0.2, 0.5, 0.19)] == [0, 1, 1, 1]
    expected = {"what": "3 instead of 7", "before_ms": 200.0, "after_ms": 190.0, "kept": True}
    assert gears.changes == [{key: pytest.approx(value) for key, value in expected.items()}]
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "kasoku: gears: 3 instead of 7, since a step takes 200.0 ms"
    assert said[1] == "kasoku: a step takes 190.0 ms with the new gears, 200.0 before: they stay"
    assert (gears.gear, len(said)) == (3, 2)
    assert [gears.window((1.0, 1.0), 0.3) for _ in range(50)] == [1] * 50, "the new state is the reference"
    assert [gears.window(QUIET) for _ in range(3)] == [1, 1, 2], "it is as it was, for a window more than before"


def test_a_change_that_brought_less_than_2_percent_is_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    gears = settled()
    for step_s in (0.2, 0.2, 0.1, 0.197):
        gears.window((1.0, 1.0), step_s)
    assert gears.changes[0]["kept"] is False
    assert gears.gear == 7
    assert capsys.readouterr().err.endswith("200.0 before: the old ones are back\n")
    assert [gears.window((1.0, 1.0)) for _ in range(50)] == [1] * 50


def test_the_more_choices_the_longer_drift_must_last() -> None:
    gears, waited = settled(lambda: ""), []
    for k in range(11):
        begun, windows = gears.choices, 0
        while gears.choices == begun and windows < 200:
            gears.window((1.0, 1.0 if k % 2 == 0 else 0.5))
            windows += 1
        waited.append(windows)
        for _ in range(3):  # the next reference
            gears.window((1.0, 1.0 if k % 2 == 0 else 0.5))
    assert waited == [2, 3, 5, 7, 11, 16, 23, 35, 52, 64, 64]


@pytest.mark.parametrize("seed", range(5))
def test_an_hour_of_5_percent_noise_makes_no_change(seed: int) -> None:
    rng, gears = random.Random(seed), Gears()
    for _ in range(HOUR):
        gears.window([x * rng.uniform(0.95, 1.05) for x in QUIET], 0.1 * rng.uniform(0.95, 1.05))
    assert gears.choices == 0


@pytest.mark.parametrize("seed", range(5))
def test_an_hour_of_heavy_tailed_noise_makes_few_choices(seed: int) -> None:
    """One window in 20 takes up to several times as long; each choice is taken and judged by steps as noisy."""
    rng, gears = random.Random(seed), Gears()
    for _ in range(HOUR):
        tail = rng.paretovariate(1) if rng.random() < 0.05 else 1
        gears.window([x * rng.gauss(1, 0.05) * tail for x in QUIET], 0.1 * rng.gauss(1, 0.02))
    assert gears.choices <= 10


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("windows", [3, 10, 25, 60, 150])
def test_an_hour_of_a_machine_that_is_slow_by_turns_makes_few_choices(windows: int, seed: int) -> None:
    """Another program comes and goes, each time for so many windows on average. Some changes are kept by luck."""
    rng, gears, slow = random.Random(seed), Gears(), False
    for _ in range(HOUR):
        slow ^= rng.random() < 1 / windows
        step_s = (0.1 if slow else 0.068) * rng.gauss(1, 0.03)
        gears.window((step_s,), step_s)
    assert gears.choices <= 20


def test_resumed_it_goes_on_as_if_nothing_had_happened() -> None:
    def run(stop: int) -> tuple[list[int], list[bool | None], int]:
        rng, gears = random.Random(0), Gears()
        gear = []
        for window in range(60):
            value = 0.5 if window // 10 % 2 else 1.0
            gears.window((1.0, value * rng.gauss(1, 0.02)), 0.1 * rng.gauss(1, 0.05))
            gear.append(gears.gear)
            if window == stop:
                state, old = json.loads(json.dumps(gears.state_dict())), gears
                gears = Gears()
                gears.load_state_dict(state)
                gears.gear, gears.choices, gears.job.steps = old.gear, old.choices, old.job.steps
        return gear, [change["kept"] for change in gears.changes], gears.choices

    whole = run(-1)
    assert {*whole[1]} == {True, False}
    assert [run(stop) for stop in range(0, 60, 7)] == [whole] * 9
