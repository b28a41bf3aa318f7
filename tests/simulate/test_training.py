"""A training whose steps are not all alike is the sum of its steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.inspected import remember_networks
from kasoku.config import recipe as recipes
from kasoku.config.updates import updates
from kasoku.distributed import Graded
from kasoku.simulate import Sharing, Simulator, load
from kasoku.simulate.from_recipe import Scenario, scenario

FOLDER = Path(__file__).parent.parent.parent / "recipes"
LARGE = FOLDER / "imagenet_resnet50_81920.toml"
GRADED = "{use='kasoku.distributed.Overlap', buckets={use='kasoku.distributed.Graded'}}"
GPUS, IMAGES = 64, 1_281_167


@pytest.fixture(autouse=True)
def _one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    remember_networks(monkeypatch)


def case_of(name: str, *settings: str, technique: str = "") -> Scenario:
    techniques = ", ".join(filter(None, (GRADED, technique)))
    return scenario(recipes.load(FOLDER / name, [f"techniques=[{techniques}]", *settings]), load("abci"))


def steps_s(case: Scenario) -> float:
    """The seconds of all steps."""
    rows = case.rows(case.step(GPUS))
    return sum(rows[item] for item in ("forward", "backward", "exposed"))


def test_a_batch_that_grows_is_the_sum_of_the_steps_of_each_batch() -> None:
    grow = "{use='kasoku.data.GrowBatch', schedule={use='kasoku.core.StepDecay', milestones=[0.4, 81], gamma=2.0}}"
    case = case_of(LARGE.name, "norm_batch=0", "batch=2560", technique=grow)
    plain = Simulator(load("abci"), case.simulator.net, Sharing(Graded(), next_forward=False))
    counts = {1: 36, 2: 45, 4: 9}  # epochs: 0.4 of 90, and then until epoch 81
    made = {factor: epochs * -(-IMAGES // (2560 * factor)) for factor, epochs in counts.items()}
    assert updates(case.recipe, IMAGES) == sum(made.values())
    plain = replace(plain, sharing=replace(case.simulator.sharing, next_forward=case.step(GPUS).inputs.late))
    expected = sum(n * plain.step(GPUS, 2560 * factor, parts=factor).step_s for factor, n in made.items())
    assert steps_s(case) == pytest.approx(expected, rel=1e-9)
    fixed = case_of(LARGE.name, "norm_batch=0", "batch=2560")
    assert steps_s(case) < steps_s(fixed)  # fewer updates, so less communication
    stretches = case.document(case.step(GPUS))["steps"]
    assert [(s["batch"], round(s["updates"])) for s in stretches] == [(2560 * f, n) for f, n in made.items()]


def test_small_images_take_their_share_of_the_pixels() -> None:
    small = "{use='kasoku.data.LowResolution', side=160, until=0.8125}"
    case = case_of("imagenet_resnet50_16epochs.toml", technique=small)
    total, gpu, simulator = updates(case.recipe, IMAGES), load("abci").device, case.simulator
    whole = simulator.step(GPUS, 1024)
    shrunk = simulator.step(GPUS, 1024, pixels=(160 / 192) ** 2)
    alpha_s = 1e-3 * gpu.alpha_ms
    assert shrunk.compute_s - alpha_s == pytest.approx((160 / 192) ** 2 * (whole.compute_s - alpha_s), rel=1e-9)
    expected = total * (13 * shrunk.step_s + 3 * whole.step_s) / 16
    assert steps_s(case) == pytest.approx(expected, rel=1e-9)
    kinds = case.document(whole)["steps"]
    assert [(kind["batch"], round(kind["pixels"], 2)) for kind in kinds] == [(1024, 0.69), (1024, 1.0)]
    assert len(case_of("imagenet_resnet50_16epochs.toml").document(whole)["steps"]) == 1


def test_synchronous_epochs_of_asynchronous_ranks_take_the_steps_of_overlap() -> None:
    pace = "{use='kasoku.distributed.Asynchronous', warmup=1.5, finish=89}"
    settings = ["norm_batch=0", "norm_average=0.0"]
    recipe = recipes.load(LARGE, [f"techniques=[{pace}]", *settings])
    case = scenario(recipe, load("abci"))
    together = replace(case.simulator, sharing=Sharing(Graded())).step(GPUS, 81920)
    expected = 16 * (2.5 * together.step_s + 87.5 * case.step(GPUS).step_s)
    assert steps_s(case) == pytest.approx(expected, rel=1e-9)
