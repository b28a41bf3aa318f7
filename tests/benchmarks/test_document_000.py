"""The benchmarks of document 000: an update of many virtual ranks is exact; settings, choices and figures are right."""

import importlib
import json
import math
import sys
import tomllib
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from kasoku.config import recipe as recipes
from kasoku.config.updates import updates
from kasoku.data import Memory, idx
from kasoku.tune import hyperparameters

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
batch_sizes, schedules, switched_off, trainings, virtual_update, simulate_abci = (
    importlib.import_module(name)
    for name in ("batch_sizes", "schedules", "switched_off", "trainings", "virtual_update", "simulate_abci")
)
Trained = trainings.Trained


# ---- one update


def test_an_update_of_2048_virtual_ranks_is_that_of_a_plain_loop_over_them():
    off = virtual_update.difference(2048, 2, 8, torch.float64)
    assert {"conv1.weight", "norm2.bias", "norm1.running_var", "head.weight"} <= set(off)
    assert max(off.values()) < 1e-12


@pytest.mark.parametrize("change", ["groups", "rate"])
def test_another_update_is_told_from_that_one(change, monkeypatch):
    before, after, seen = virtual_update.ours(64, 4, 4, torch.float64)
    if change == "rate":
        monkeypatch.setattr(virtual_update, "LR", 13.001)
    other = virtual_update.reference(before, seen, 32 if change == "groups" else 64)
    assert (after["conv1.weight"] - other["conv1.weight"]).abs().max() > 1e-7


# ---- trainings


def test_every_setting_of_a_benchmark_is_one_that_the_recipe_takes():
    for form, (rule, batch) in product((batch_sizes.Form(), batch_sizes.SHORT), product(batch_sizes.RULES, (256, 768))):
        recipes.load(batch_sizes.RECIPE, form.settings(rule, batch, 2.0, seed=1))
    for form, name in product((schedules.Form(), schedules.SHORT), schedules.SCHEDULES):
        recipes.load(schedules.RECIPE, form.settings(name, "root"))
    for settings in switched_off.SIDES.values():
        recipes.load(switched_off.RECIPE, [*switched_off.SHORT, *settings])


@pytest.mark.parametrize("path", sorted(trainings.DOCUMENTS.glob("000_*.toml")), ids=lambda path: path.stem)
def test_a_recipe_of_the_document_written_back_is_equal(path):
    recipe = recipes.load(path)
    assert recipes.from_document(tomllib.loads(recipes.dumps(recipe))) == recipe
    assert path.read_text().startswith("# "), "the first line is what `kasoku list` shows"


def test_the_recipes_make_the_updates_that_their_comments_say():
    few, many = (recipes.load(trainings.DOCUMENTS / f"000_{name}.toml") for name in ("few_updates", "1440_updates"))
    assert updates(few, 60_000) == 240
    assert updates(many, 60_000) == 1440
    published = recipes.load("imagenet_resnet50_81920")
    assert (many.epochs, many.norm_batch, many.schedule) == (90, published.norm_batch, published.schedule)
    ours, theirs = many.optimizer.keys, published.optimizer.keys
    assert {"lr", "trust"} == {key for key in ours if ours[key] != theirs[key]}
    assert ours["lr"] * ours["trust"].eta == pytest.approx(theirs["lr"] * theirs["trust"].eta, rel=0.02)


def test_a_few_updates_batch_is_the_largest_with_15_updates_an_epoch():
    assert batch_sizes.Form().few == 2048
    assert batch_sizes.SHORT.few == 768


def test_images_that_choose_settings_are_neither_trained_on_nor_tested_on(tmp_path, monkeypatch):
    read = partial(idx, classes=tuple(map(str, range(24))))
    generator = torch.Generator().manual_seed(0)
    x_NHWC = torch.randint(0, 256, (30, 4, 4, 1), dtype=torch.uint8, generator=generator)
    test = Memory(x_NHWC[24:], torch.arange(6))
    source = trainings.write_idx(tmp_path / "source", Memory(x_NHWC[:24], torch.arange(24)), test)
    monkeypatch.setattr(trainings, "HELD_OUT", 5)
    monkeypatch.setattr(trainings, "fashion_mnist", read)
    held_out = read(trainings.held_out_folder(source, tmp_path, 12))
    assert torch.equal(held_out.train.images_NHWC, x_NHWC[:12])
    assert torch.equal(held_out.test.labels_N, torch.arange(19, 24))
    whole = read(trainings.held_out_folder(source, tmp_path))
    assert torch.equal(whole.train.labels_N, torch.arange(19))
    compared = read(trainings.data_folder(source, tmp_path, 12))
    assert torch.equal(compared.test.images_NHWC, x_NHWC[24:])
    assert trainings.data_folder(source, tmp_path) == source


@pytest.mark.process
def test_a_training_is_read_when_it_is_there_and_one_that_diverges_counts_0(tmp_path):
    generator = torch.Generator().manual_seed(0)
    x_NHWC = torch.randint(0, 256, (64, 28, 28, 1), dtype=torch.uint8, generator=generator)
    images = Memory(x_NHWC, torch.arange(64) % 10)
    root = trainings.write_idx(tmp_path / "data", images, images)
    small = [f"data.root={root}", "batch=32", "norm_batch=32", "epochs=2", "evaluate.every=1"]
    runs = {("fine", 0): small, ("diverges", 0): [*small, 'optimizer={use="kasoku.optim.sgd", lr=1e30}']}
    trained = trainings.train_all(switched_off.RECIPE, runs, tmp_path / "runs", 2)
    assert trained["diverges", 0] == Trained(0.0)
    assert [epoch for epoch, _ in trained["fine", 0].over_epochs("test_stale_top1")] == [1, 2]
    written = (tmp_path / "runs" / "fine-0" / "metrics.jsonl").stat().st_mtime_ns
    assert trainings.train(switched_off.RECIPE, small, tmp_path / "runs" / "fine-0") == trained["fine", 0]
    assert (tmp_path / "runs" / "fine-0" / "metrics.jsonl").stat().st_mtime_ns == written
    with pytest.raises(SystemExit, match="exit code 2"):
        trainings.train(switched_off.RECIPE, ["batch=0"], tmp_path / "refused")


def test_the_best_factor_of_each_rule_and_batch_is_taken():
    form = batch_sizes.Form(batches=(256, 2048))
    tried = {key: Trained(0.5) for key in product(batch_sizes.RULES, form.batches, form.factors)}
    tried["muon", 2048, 2.0] = Trained(0.6)
    chosen = batch_sizes.chosen(form, tried)
    assert chosen["muon", 2048] == 2.0
    assert chosen["lars", 256] == form.factors[0]
    assert set(batch_sizes.chosen(batch_sizes.SHORT, {}).values()) == {1.0}


def test_accuracies_over_the_batch_are_means_over_seeds():
    form = batch_sizes.Form(batches=(256, 2048))
    pairs = list(product(batch_sizes.RULES, form.batches))
    top1 = {pair: [0.8, 0.9, 0.94] for pair in pairs} | {("lars", 2048): [0.81, 0.92, 0.94]}
    figures = batch_sizes.figures(form, dict.fromkeys(pairs, 1.0), top1)
    assert figures["lars"]["accuracy_by_batch"] == [[256, 0.88], [2048, 0.89]]
    assert figures["lars"]["error_over_smallest"] == pytest.approx(0.11 / 0.12, abs=1e-4)
    assert figures["lars_minus_muon"] == pytest.approx(1.0)
    low, high = figures["lars_minus_muon_interval"]
    assert low < 0 < 1 < high


def test_the_arc_cotangent_is_held_against_the_best_other_schedule():
    top1 = {name: [0.9, 0.901, 0.902] for name in schedules.SCHEDULES} | {"cosine": [0.91, 0.911, 0.9121]}
    figures = schedules.figures(top1)
    assert figures["best_other"] == "cosine"
    assert figures["arc_cotangent_minus_best_other"] == pytest.approx(-1.003, abs=1e-3)
    assert figures["arc_cotangent_minus_best_other_interval"][1] < 0
    assert figures["arc_cotangent_is"] == "less accurate"
    one_seed = schedules.figures({name: values[:1] for name, values in top1.items()})
    assert one_seed["arc_cotangent_minus_best_other_interval"] is None
    assert one_seed["arc_cotangent_is"] == "undecided"


def test_the_best_trial_of_a_search_gives_its_settings(tmp_path):
    def trial(number: int, how: str, top1: float | None) -> hyperparameters.TrialResult:
        settings = {"optimizer.lr": f"{number}.5", "schedule.warmup": "0.1"}
        return hyperparameters.TrialResult(number, how, settings, {"top1": top1, "seconds": 1.0}, "folder")

    hyperparameters._write(tmp_path, [trial(2, "done", 0.9), trial(1, "done", 0.8)])
    found = schedules.best_settings(json.loads((tmp_path / "search.json").read_text()))
    assert found == (["optimizer.lr=2.5", "schedule.warmup=0.1"], 0.9)
    hyperparameters._write(tmp_path, [trial(1, "diverged", None)])
    with pytest.raises(SystemExit, match="no trial of 1 is done"):
        schedules.best_settings(json.loads((tmp_path / "search.json").read_text()))


def test_what_is_switched_off_is_compared_at_the_end_and_midway():
    def run(*values: tuple[float, float]) -> Trained:
        lines = [{"epoch": epoch, "test_top1": a, "test_stale_top1": b} for epoch, (a, b) in enumerate(values, 1)]
        return Trained(values[-1][0], lines)

    sides = {"all": [run((0.7, 0.6), (0.9, 0.89))], "without_smoothing": [run((0.7, 0.6), (0.88, 0.87))]}
    sides["without_averages"] = [run((0.7, 0.5), (0.9, 0.86))]
    sides["without_warmup"] = [Trained(0.0)]
    figures = switched_off.figures(sides)
    assert figures["warmup_points"] == pytest.approx(90)  # without it the training diverges
    assert figures["smoothing_points"] == pytest.approx(2)
    assert figures["averages_points"] == pytest.approx(3)
    assert figures["recalibration_points"] == pytest.approx(1)
    assert figures["averages_midway_points"] == pytest.approx(10)
    assert figures["accuracy_by_epoch"] == [(1, 0.7), (2, 0.9)]


# ---- simulation


def test_the_simulated_training_is_made_of_its_steps():
    (step,) = simulate_abci.steps(simulate_abci.network(), simulate_abci.GROUPS, [40])
    assert step.images == 81_920
    rest = simulate_abci.training_s(step) - 1440 * step.step_s
    assert rest == pytest.approx(1.3 + 0.6 + 23 * 0.06)
    assert math.isclose(step.images_per_s, 81_920 / step.step_s)
