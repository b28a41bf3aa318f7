"""What a recipe would do is known before it does it."""

import json
from pathlib import Path

import pytest
from torch import nn

from kasoku.cli import main
from kasoku.config import recipe as recipes
from kasoku.config.updates import data_info, moments, schedule_warning, updates
from kasoku.core import ArcCotangent, InputError, Linear, Polynomial

FOLDER = Path(__file__).parent.parent.parent / "recipes"
LARGE = FOLDER / "imagenet_resnet50_81920.toml"
MLPERF = FOLDER / "imagenet_resnet50_mlperf.toml"
DIGITS = FOLDER / "digits_cnn_98.toml"
IMAGENET = 1_281_167
GROUP = {"lr": 13.0, "momentum": 0.96, "weight_decay": 5e-5, "decoupled": True, "form": "mlperf"}


def test_the_81920_recipe_makes_1440_updates_on_the_published_curve():
    recipe = recipes.load(LARGE)
    assert updates(recipe, IMAGENET) == 1440
    course = moments(recipe, IMAGENET, GROUP)
    assert len(course) == 1440
    curve = ArcCotangent(turn=70, decay=5)
    for m in course:
        factor = curve(m.epoch) if m.epoch >= 15 else m.epoch / 15 * curve(15)
        assert m.lr == pytest.approx(13 * factor)
        assert m.weight_decay == pytest.approx(5e-5 * factor)  # [000]'s code: decay follows the same ratio
    at = {round(m.epoch, 3): m.lr / 13 for m in course}
    assert [round(at[e], 3) for e in (30, 50, 60, 65, 68, 70, 72, 75, 80)] == [
        0.996, 0.974, 0.898, 0.769, 0.623, 0.5, 0.273, 0.102, 0.026]  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "lr", "warmup", "momentum", "decay", "epochs"),
    [(1632, 7.4, 2, 0.9, 5e-5, 35.0), (13056, 12.8, 9, 0.9, 2.5e-5, 45.4), (67840, 24.699, 31, 0.951807, 1e-4, 85.9)],
)
def test_an_mlperf_point_is_taken_as_published(batch, lr, warmup, momentum, decay, epochs):
    recipe = recipes.load(MLPERF, [f"batch={batch}"])
    keys = recipe.optimizer.keys
    assert (keys["lr"], keys["momentum"], keys["weight_decay"]) == (lr, momentum, decay)
    assert (recipe.scaled_schedule.warmup, recipe.epochs, recipe.scaled_schedule.epochs) == (warmup, epochs, epochs)
    assert recipe.origin == f"the point {batch:,}"
    assert recipes.dumps(recipes.load(MLPERF, [f"batch={batch}"])).count("points") == 0


def test_between_two_points_numbers_are_interpolated_and_said_to_be():
    recipe = recipes.load(MLPERF, ["batch=16384"])
    assert 12.8 < recipe.optimizer.keys["lr"] < 21.2
    assert 45.4 < recipe.epochs < 56.0
    assert "interpolated: ours" in recipe.origin
    assert recipes.load(MLPERF, ["batch=16384", "optimizer.lr=3.5"]).optimizer.keys["lr"] == 3.5


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        (["batch=512"], "batch=512: this recipe has settings for 1632 to 67840"),
        (["points=3"], r"points: \[\[points\]\] tables are wanted"),
        (["points=[{batch=0}]"], r"points: \[\[points\]\] tables are wanted, each of another batch"),
        (["points=[{batch=8}, {batch=8}]"], "each of another batch"),
        (["points=[]", "batch=100"], "norm_batch=32: a divisor of batch=100"),
        (["batch=4096", "epochs=3"], "epochs=3 is where it ends and must lie beyond warmup=5"),
    ],
)
def test_points_that_cannot_be_used(setting, line):
    with pytest.raises(InputError, match=line):
        recipes.load(MLPERF, setting)


@pytest.mark.parametrize(("scaling", "scale", "warmup"), [("linear", 4.0, 1.0), ("sqrt", 2.0, 1.0), ("legw", 2.0, 4.0)])
def test_a_reference_recipe_scales_to_any_batch(scaling, scale, warmup):
    settings = [f"scaling={scaling}", "reference_batch=64", "batch=256", "schedule.warmup=1"]
    recipe = recipes.load(DIGITS, settings)
    assert recipe.rate_scale == scale
    assert recipe.scaled_schedule.warmup == warmup
    assert recipe.scaled_schedule.epochs == recipe.epochs


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_the_schedules_of_the_recipes_end_with_the_training(path):
    recipe = recipes.load(path)
    assert schedule_warning(recipe) == ""
    longer = recipes.load(path, [f"epochs={2 * recipe.epochs}"])
    assert longer.scaled_schedule.epochs == 2 * recipe.epochs
    assert longer.scaled_schedule(1.9 * recipe.epochs) > 1e-3
    if path != MLPERF:  # whose points have their published warm-ups
        curve, twice = ([s.scaled_schedule(s.epochs * i / 99) for i in range(100)] for s in (recipe, longer))
        assert twice == pytest.approx(curve, abs=1e-12)
    assert schedule_warning(longer) == ""


@pytest.mark.parametrize(
    ("path", "settings", "line"),
    [
        (DIGITS, ["schedule.epochs=20", "epochs=30"], "the rate is 0 for the last 33% of the training (30 epochs)"),
        (DIGITS, ["schedule.epochs=30"], "still has 33% to fall at the end of the training (20 epochs)"),
        (DIGITS, ["schedule.epochs=19.5"], ""),
        (DIGITS, ["schedule.epochs=10", "schedule.end=0.1"], ""),  # a rate that stays
        (MLPERF, ["epochs=60", "schedule.epochs=40"], "the rate is 0 for the last 33%"),
        (LARGE, ["epochs=50", "schedule.turn=70"], "still has 97% to fall"),
        (LARGE, ["epochs=250", "schedule.turn=70"], "to mend it: change its times (below 1: shares of it)"),
        (LARGE, ["epochs=50"], ""),
        (LARGE, ["epochs=250"], ""),
        (DIGITS, ["schedule.warmup=0.5"], "warmup=0.5: a share of the training, 10 of 20 epochs; for part of an epoch"),
        (DIGITS, ["schedule.warmup=0.5", "schedule.epochs=10"], "a share of the training, 5 of 10 epochs"),
        (DIGITS, ["schedule={use='kasoku.core.StepDecay', milestones=[9, 30]}"], "still has 9% to fall"),
        (DIGITS, ["schedule={use='kasoku.core.StepDecay', milestones=[9, 18]}"], ""),
    ],
)
def test_a_schedule_that_does_not_fit_the_training_is_said(path, settings, line):
    warning = schedule_warning(recipes.load(path, settings))
    assert line in warning
    assert bool(warning) == bool(line)


@pytest.mark.parametrize(
    ("path", "settings", "schedule"),
    [
        (LARGE, [], ArcCotangent(warmup=15, turn=70, decay=5)),
        (FOLDER / "imagenette_resnet18.toml", [], Linear(warmup=1, epochs=16)),
        (FOLDER / "imagenet_resnet50_16epochs.toml", [], Linear(warmup=2, epochs=16)),
        (FOLDER / "cifar10_cifarnet_94.toml", [], Linear(epochs=12)),
        (MLPERF, ["batch=1632"], Polynomial(warmup=2, epochs=35, end=1.35e-5)),
        (MLPERF, ["batch=67840"], Polynomial(warmup=31, epochs=85.9, end=4.05e-6)),
    ],
)
def test_shares_give_the_rates_of_the_published_epochs(path, settings, schedule):
    recipe = recipes.load(path, settings)
    epochs = [recipe.epochs * i / 1000 for i in range(1001)]
    assert [recipe.scaled_schedule(e) for e in epochs] == pytest.approx([schedule(e) for e in epochs], abs=1e-12)


def test_techniques_follow_the_epochs_of_a_recipe():
    small = recipes.load(FOLDER / "imagenette_resnet18.toml", ["epochs=32"]).scaled_techniques[1]
    assert [small.size(epoch, (128, 128))[0] for epoch in (0, 19.9, 20, 31)] == [96, 96, 128, 128]
    recipe = recipes.load(DIGITS, ["techniques=[{use='kasoku.data.GrowBatch'}]", "epochs=9"])
    assert [recipe.scaled_techniques[0].batch_factor(epoch) for epoch in range(9)] == [1, 1, 1, 2, 2, 2, 4, 4, 4]


@pytest.mark.parametrize(("warmup", "batch", "epochs"), [(0.1, 128, 4.0), (1, 32, 0.5), (0.05, 32, 0.5)])
def test_legw_stretches_shares_too(warmup, batch, epochs):
    settings = ["scaling=legw", "reference_batch=64", f"batch={batch}", f"schedule.warmup={warmup}"]
    assert recipes.load(DIGITS, settings).scaled_schedule.warmup_epochs == pytest.approx(epochs)


def test_legw_may_stretch_a_warm_up_too_far():
    with pytest.raises(InputError, match="warmup"):
        recipes.load(DIGITS, ["scaling=legw", "reference_batch=8", "batch=512", "schedule.warmup=1"])


@pytest.mark.parametrize("epochs", [0.5, 1.0001, 2.001, 2.5, 3, 200.001])
def test_the_moments_are_every_so_many_updates_and_the_last_one(epochs):
    recipe = recipes.load(DIGITS, ["batch=100", f"epochs={epochs}"])
    total = updates(recipe, 1437)
    begins = [epoch + i / 14 for epoch in range(201) for i in range(14)][:total]
    every = max(1, total // 1000)
    expected = [at for i, at in enumerate(begins) if i % every == 0 or i == total - 1]
    assert [m.epoch for m in moments(recipe, 1437, {"lr": 1.0})] == expected


def test_a_growing_batch_is_counted():
    grow = ["techniques=[{use='kasoku.data.GrowBatch', schedule={use='kasoku.core.StepDecay', milestones=[1, 2]}}]"]
    recipe = recipes.load(DIGITS, [*grow, "batch=100", "epochs=3.5", "techniques.0.schedule.gamma=2"])
    assert updates(recipe, 1437) == 14 + 7 + 3 + 2  # of half the fourth epoch's 3: 1.5, rounded to even
    course = moments(recipe, 1437, {"lr": 1.0})
    assert [m.batch for m in course] == [100] * 14 + [200] * 7 + [400] * 5
    assert course[14].epoch == 1.0


def test_a_batch_that_outgrows_the_data_is_refused_before_the_start(capsys):
    grow = "techniques=[{use='kasoku.data.GrowBatch', schedule={use='kasoku.core.StepDecay', milestones=[2], gamma=2}}]"
    settings = ["--set", grow, "--set", "batch=1000", "--set", "epochs=4", "--dry-run"]
    assert main(["train", str(DIGITS), *settings]) == 2
    assert "batch=2000 in epoch 2: at most 1437 images" in capsys.readouterr().err


def test_momentum_is_shown_as_it_acts_where_the_rule_corrects_it():
    recipe = recipes.load(LARGE)
    course = moments(recipe, IMAGENET, {**GROUP, "form": "mxnet"})
    assert course[2].momentum == pytest.approx(0.96 * 2)  # the rate doubles from update 1 to update 2
    assert course[-1].momentum < 0.96


def test_dry_run_prints_without_the_data_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["train", str(LARGE), "--dry-run"]) == 0
    out, err = capsys.readouterr()
    for shown in ("81,920", "1,440 in 90 epochs", "2,048 of 40 images", "12.977 at epoch 15.0", "0.96"):
        assert shown in out, shown
    assert "published 1,281,167 images" in err
    assert not [*tmp_path.iterdir()]


def test_data_that_is_not_here_has_its_published_size_with_what_the_recipe_pads(tmp_path):
    recipe = recipes.load(FOLDER / "documents" / "002_vgg16_small.toml", [f"data.root={tmp_path}"])
    facts, note = data_info(recipe)
    assert facts.side == 32
    assert "the data is not here" in note


def test_dry_run_counts_the_data_that_is_here(capsys):
    settings = ["--set", "reference_batch=64", "--set", "batch=128", "--set", "scaling=sqrt"]
    assert main(["train", str(DIGITS), "--dry-run", *settings]) == 0
    out, err = capsys.readouterr()
    assert "of 1,437 images" in out
    assert "rates x 1.414" in out
    assert not err


def small(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Two convolutions with BatchNorm, and a head."""
    layers = []
    for channels in (16, 32):
        layers += [nn.Conv2d(in_channels, channels, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(channels)]
        layers += [nn.ReLU()]
        in_channels = channels
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * (image_size // 4) ** 2, num_classes))


@pytest.mark.exhaustive
def test_the_whole_81920_schedule_runs_on_a_small_network(tmp_path, capsys):
    """All 1,440 updates: its schedule, its LARS, 16 an epoch, virtual ranks; on the digits, 10 images a rank."""
    settings = ["batch=90", "norm_batch=10", "model={use='test_updates.small'}"]
    settings += ["data={use='kasoku.data.digits'}", "techniques=[{use='kasoku.distributed.Recalibrate', images=0}]"]
    settings += ["reference_batch=81920", "scaling=sqrt"]  # the rate of 96 images is not that of 81,920
    settings += ["evaluate.every=45", "evaluate.target=0", "device.threads=1", "save.every_s=0"]
    options = [part for setting in settings for part in ("--set", setting)]
    out = tmp_path / "run"
    assert main(["train", str(LARGE), *options, "--allow", "test_updates", "--out", str(out)]) == 0
    assert "9 of 10 images" in capsys.readouterr().out
    result = json.loads((out / "result.json").read_text())
    assert result["steps"] == 1440
    assert result["top1"] > 0.95
