"""Every recipe of the house loads, writes itself back equal, and trains a step on stand-in data."""

import dataclasses
import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kasoku.cli import main
from kasoku.config import recipe as recipes
from kasoku.config.toml import Factory
from kasoku.data import Dataset, Memory
from kasoku.training.trainer import build

FOLDER = Path(__file__).parent.parent.parent / "recipes"
RECIPES = sorted(FOLDER.glob("*.toml"))
SHAPES = {"cifar10": (3, 32), "fashion_mnist": (1, 28), "digits": (1, 8), "imagenet": (3, 64)}
SMALL = {  # what a recipe for a cluster needs to run here
    "imagenet_resnet50_81920": ["norm_batch=5", "techniques.0.crop=center"],
    "imagenet_resnet50_mlperf": [
        "points=[{batch=20, epochs=35.0, optimizer={lr=7.4}, schedule={warmup=2, epochs=35.0}}]",
        "norm_batch=5",
        "techniques.0.crop=center",
    ],
    "imagenet_resnet50_16epochs": ["techniques.0.crop=center", "techniques.1.side=48"],
}


def stand_in(channels: int, side: int, images: int) -> Dataset:
    """Random images of the right shape."""
    x = torch.randint(0, 256, (images, side, side, channels), dtype=torch.uint8)
    split = Memory(x, torch.arange(images) % 10)
    mean, std = (0.5,) * channels, (0.25,) * channels
    return Dataset("stand-in", tuple("0123456789"), split, split, channels, (side, side), mean, std)


def photos(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    for part, images in (("train", 8), ("val", 2)):
        for k in range(10):
            (folder / part / f"class{k}").mkdir(parents=True)
            for i in range(images):
                pixels = rng.integers(0, 256, (150, 150, 3), np.uint8)
                Image.fromarray(pixels).save(folder / part / f"class{k}" / f"{i}.jpg")
    return folder


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_written_back_is_equal(path):
    recipe = recipes.load(path)
    assert recipes.from_document(tomllib.loads(recipes.dumps(recipe))) == recipe
    assert path.read_text().startswith("# "), "the first line is what `kasoku list` shows"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains_two_steps_on_stand_in_data(path, tmp_path, monkeypatch):
    recipe = recipes.load(path, ["batch=20", "evaluate.batch=20", "device.threads=1", *SMALL.get(path.stem, [])])
    source = recipe.data.use.rpartition(".")[2]
    if source == "folder":
        data = Factory("kasoku.data.folder", {**recipe.data.keys, "size": 64, "root": str(photos(tmp_path / "photos"))})
    else:
        made = stand_in(*SHAPES[source], images=60)

        def stands_in(root="", seed=0, size=0):
            return made

        stands_in.__module__, stands_in.__name__ = "kasoku.data", source
        monkeypatch.setattr(f"kasoku.data.{source}", stands_in)
        data = Factory(recipe.data.use)
    training = build(dataclasses.replace(recipe, data=data))
    job, before = training.job, None
    batches = (batch for _ in range(2) for batch in job.loader)
    for _ in range(2):
        for _ in range(job.accumulate):
            x, y = next(batches)
            loss = job.loss(job.model(x), y) / job.accumulate
            loss.backward()
        before = before if before is not None else [p.detach().clone() for p in job.model.parameters()]
        job.optimizer.step()
        job.optimizer.zero_grad()
        assert torch.isfinite(loss)
    moved = [not a.equal(b) for a, b in zip(before, job.model.parameters(), strict=True) if b.requires_grad]
    assert sum(moved) > len(moved) / 2


@pytest.mark.data
def test_fashion_mnist_learns_from_the_real_files(real_data, tmp_path):
    """A quarter of an epoch, 30 steps: far better than chance."""
    settings = [
        "epochs=0.25",
        "schedule.epochs=0.25",
        f"data.root={real_data / 'fashion_mnist'}",
        "model.norm_momentum=0.5",
        "model.widths=[16, 32, 64]",
        "device.threads=1",
    ]
    options = [part for setting in settings for part in ("--set", setting)]
    out = tmp_path / "run"
    recipe = FOLDER / "fashion_cifarnet_93.toml"
    assert main(["train", str(recipe), *options, "--quiet", "--out", str(out)]) == 0
    assert json.loads((out / "result.json").read_text())["top1"] > 0.6


@pytest.mark.data
def test_imagenet_photos_train_from_the_real_folders(real_data, tmp_path):
    """Two steps of the real recipe on real JPEGs, at a small size."""
    settings = ["epochs=0.08", "data.size=64", "schedule.epochs=1", "schedule.warmup=0", "evaluate.batch=200"]
    settings.append("device.threads=1")
    options = [part for setting in settings for part in ("--set", setting)]
    out = tmp_path / "run"
    root = f"data.root={real_data / 'imagenette224'}"
    recipe = FOLDER / "imagenette_resnet18.toml"
    assert main(["train", str(recipe), *options, "--set", root, "--quiet", "--out", str(out)]) == 0
    result = json.loads((out / "result.json").read_text())
    assert 0 < result["top1"] < 1
    assert json.loads((out / "data.json").read_text())["classes"][0].startswith("n0")


def test_synchronous_steps_beside_a_technique_that_averages_are_its_own():
    apart = "{use='kasoku.distributed.Asynchronous', max_staleness=0}"
    for name in ("Overlap", "AllReduce"):
        recipe = recipes.load("digits_cnn_98", [f"techniques=[{apart}, {{use='kasoku.distributed.{name}'}}]"])
        assert [type(technique).__name__ for technique in recipe.scaled_techniques] == [name]
