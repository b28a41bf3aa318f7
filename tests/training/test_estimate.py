"""A training on a folder of photos says before it starts what it will do, and about how long that takes."""

import json
import re
from pathlib import Path

import pytest
import torch

from helpers.photos import coloured_photos
from kasoku.cli import main
from kasoku.config.from_folder import recipe_for
from kasoku.config.recipe import from_document, load
from kasoku.core import Technique
from kasoku.data import Dataset, Files, LowResolution
from kasoku.training import auto_batch
from kasoku.training.trainer import build
from kasoku.tune import BatchSizeResult
from kasoku.tune.measurement import Measurement

SMALL = ["--set", 'model={use = "kasoku.models.cifarnet", widths = [8, 8]}', "--set", "device.threads=1"]
SHORT = [*SMALL, "--set", "epochs=2", "--set", "data.size=32"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return coloured_photos(tmp_path / "photos")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)


def rows(shown: str) -> dict[str, str]:
    """The table of two columns in an output."""
    return {name.strip(): value.strip() for name, value in re.findall(r"^│ ([^│]+)│ ([^│]+)│$", shown, re.MULTILINE)}


@pytest.mark.usefixtures("one_core")
def test_a_dry_run_on_photos_says_what_was_chosen_and_how_long_it_takes(photos, capsys):
    assert main(["train", "--data", str(photos), *SHORT, "--dry-run"]) == 0
    table = rows(capsys.readouterr().out)
    assert table["network"].startswith("kasoku.models.cifarnet, 0.0 M")
    assert table["classes"] == "3: colour0, colour1, colour2"
    assert table["images"] == "42 to train, 6 to test (10% of each class)"
    assert table["image size"] == "32 pixels"
    assert "flip=random" in table["augmentation"]
    assert re.fullmatch(r"about \d+ (s|min|h) on this machine, from a few steps", table["time"])
    assert not list(Path("runs").glob("*"))


@pytest.mark.usefixtures("one_core")
def test_a_training_on_photos_begins_with_the_same_rows(photos, capsys):
    assert main(["train", "--data", str(photos), *SHORT, "--out", "run"]) == 0
    out = capsys.readouterr().out
    assert rows(out.partition("accuracy")[0]).keys() >= {"network", "classes", "images", "image size", "time"}


@pytest.mark.usefixtures("one_core")
def test_an_estimate_changes_no_bit_of_the_training(photos, capsys):
    weights = []
    for name, quiet in (("shown", []), ("quiet", ["--quiet"])):
        assert main(["train", "--data", str(photos), *SHORT, *quiet, "--out", name]) == 0
        weights.append(Path(name, "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


@pytest.mark.parametrize("batch", [1, 2])
def test_a_batch_of_few_photos_is_estimated_too(photos, capsys, batch):
    assert main(["train", "--data", str(photos), *SHORT, "--set", f"batch={batch}", "--dry-run"]) == 0
    assert rows(capsys.readouterr().out)["time"].startswith("about ")


def test_a_validation_part_is_named(photos, tmp_path, capsys):
    for part in ("train", "val"):
        coloured_photos(tmp_path / "parts" / part, images=8)
    assert main(["train", "--data", str(tmp_path / "parts"), *SHORT, "--dry-run"]) == 0
    assert rows(capsys.readouterr().out)["images"] == "24 to train, 24 to test (those of val/)"


def test_epochs_of_fewer_pixels_take_less_time(photos, monkeypatch):
    times = []
    for techniques in ([], [{"use": "kasoku.data.LowResolution", "side": 16, "until": 2}]):
        document = {
            "model": {"use": "kasoku.models.cifarnet", "widths": [8, 8]},
            "data": {"use": "kasoku.data.folder", "root": str(photos), "size": 32},
            "optimizer": {"use": "kasoku.optim.sgd"},
            "epochs": 4,
            "batch": 8,
            "techniques": techniques,
            "device": {"threads": 1},
        }
        training = build(from_document(document))
        monkeypatch.setattr(auto_batch, "tune_batch_size", planted(fixed_s=1.0, image_s=0.5))
        times.append(auto_batch.estimated_s(training))
    steps, images, tests = 4 * 5, 4 * 42, 4 * 6
    assert times[0] == pytest.approx(steps * 1.0 + images * 0.5 + tests * 0.5 / 3)
    assert times[1] == pytest.approx(steps * 1.0 + images * 0.5 * (0.25 + 1) / 2 + tests * 0.5 / 3)


def planted(*, fixed_s: float, image_s: float):
    """A search of batch sizes on a machine with these times."""

    samples = tuple(Measurement(batch, fixed_s + batch * image_s) for batch in (2, 8))
    return lambda *args, **settings: BatchSizeResult(2, samples, "planted", 0.0)


def test_the_share_of_pixels_is_that_of_the_images_shown():
    assert LowResolution(96, until=10).pixel_share(3, 128) == 0.5625
    assert LowResolution(96, until=10).pixel_share(10, 128) == 1
    assert LowResolution(96, until=10).pixel_share(3, 64) == 1  # never enlarged
    assert Technique().pixel_share(0, 32) == 1


@pytest.mark.timing
def test_the_estimate_is_near_the_time_of_the_training(photos, capsys):
    """Within a factor of two, as other programs may run; start and results take about 1.5 s that are not in it."""
    settings = ["--set", "epochs=24", "--set", "data.size=64", "--set", "device.threads=1", "--out", "run"]
    assert main(["train", "--data", str(photos), *settings]) == 0
    told = float(re.search(r"about (\d+) s", capsys.readouterr().out)[1])
    took = json.loads(Path("run/result.json").read_text())["seconds_by"]
    spent = sum(seconds for name, seconds in took.items() if name not in ("setup", "import"))
    assert spent / 2 < told < spent * 2


def many(photos: Path, each: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that seems to have this number of photos of 3 classes."""
    names = tuple(sorted(map(str, photos.rglob("*.jpg"))))[:3]
    split = Files(names * each, torch.zeros(3 * each, dtype=torch.int64))

    def folder(root: str, size: int) -> Dataset:
        return Dataset("photos", ("a",), split, split, 3, (64, 64), (0.5,) * 3, (0.2,) * 3)

    monkeypatch.setattr("kasoku.data.datasets.tables.folder", folder)
    return photos


@pytest.mark.parametrize(("each", "epochs"), [(20, 60), (170, 60), (2000, 16), (20000, 4)])
def test_more_photos_take_fewer_epochs_and_at_most_4000_updates(photos, monkeypatch, each, epochs):
    recipe = recipe_for(many(photos, each, monkeypatch), None)
    assert recipe.epochs == epochs
    assert recipe.epochs * (3 * each // recipe.batch) <= 4000


def test_1700_photos_have_the_settings_of_the_recipe_that_was_measured(tmp_path, monkeypatch):
    photos = many(coloured_photos(tmp_path / "large", images=1, side=130), 567, monkeypatch)
    ours, measured = recipe_for(photos, None), load("imagenette_resnet18")
    for name in ("model", "optimizer", "schedule", "loss", "techniques", "epochs", "batch"):
        assert getattr(ours, name) == getattr(measured, name), name


def test_classes_with_too_few_images_are_named_at_the_start(photos, capsys):
    for file in sorted((photos / "colour1").iterdir())[1:]:
        file.unlink()
    settings = [*SHORT, "--set", "model.num_classes=5", "--quiet"]
    assert main(["train", "--data", str(photos), *settings, "--out", "run"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "classes" in line]
    assert len(lines) == 1
    assert "1 of 3 classes with one image to train with (colour1)" in lines[0]
    assert "1 of 3 classes with no image to test with (colour1)" in lines[0]
    assert "model.num_classes = 5, and the data has 3 classes" in lines[0]
