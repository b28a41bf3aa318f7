"""`kasoku init` writes a recipe with a comment on each key, which trains as the one it was made from."""

import re
import tomllib

import pytest

from helpers.photos import coloured_photos
from kasoku.cli import main
from kasoku.config import describe
from kasoku.config.from_folder import recipe_for
from kasoku.config.recipe import Evaluate, Recipe, dumps, load
from kasoku.config.shipped import RECIPES

SHORT = ["--set", "device.threads=1", "--quiet"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", RECIPES)
def test_the_written_recipe_equals_the_shipped_one(name, here):
    assert main(["init", name, "--out", "mine.toml"]) == 0
    assert load(here / "mine.toml", ["origin="]) == load(RECIPES[name], ["origin="])


def test_every_key_has_its_line_above_it(here):
    assert main(["init", "digits_cnn_98"]) == 0
    text = (here / "digits_cnn_98.toml").read_text()
    for thing, part in ((Recipe, text), (Evaluate, text.partition("[evaluate]")[2])):
        for setting in describe.settings_of(thing):
            if setting.name != "origin":
                comment, key, _ = re.split(rf"^(\[+{setting.name}]+|{setting.name} =)", part, maxsplit=1, flags=re.M)
                assert " ".join(comment.replace("\n#", " ").split()).endswith(setting.line), key
    lines = text.splitlines()
    assert "# norm_momentum = 0.4" in lines, "settings that the recipe leaves out stand there as comments"


def test_keys_that_go_to_a_function_as_they_are_and_an_auto_batch_stay(here):
    model = "model={use='kasoku.models.huggingface', model_name='vit', hidden_size=96}"
    (here / "own.toml").write_text(dumps(load(RECIPES["digits_cnn_98"], ["batch=auto", "reference_batch=64", model])))
    assert main(["init", "own.toml", "--out", "mine.toml"]) == 0
    mine = load(here / "mine.toml")
    assert mine.model.keys["hidden_size"] == 96
    assert mine.auto_batch
    assert mine == load(here / "own.toml")


@pytest.mark.usefixtures("one_core")
def test_a_recipe_for_photos_is_what_train_would_use_and_trains(here):
    photos = coloured_photos(here / "photos")
    assert main(["init", "photos"]) == 0
    assert load(here / "photos.toml") == recipe_for(photos, None)
    settings = ["--set", "epochs=1", "--set", "schedule.warmup=0", "--set", "data.size=32"]
    assert main(["train", "photos", *settings, *SHORT, "--out", "run"]) == 0
    assert tomllib.loads((here / "run" / "recipe.toml").read_text())["data"]["root"] == str(photos)


def test_nothing_is_overwritten_and_a_wrong_name_is_answered(here, capsys):
    (here / "digits_cnn_98.toml").write_text("# mine")
    assert main(["init", "digits_cnn_98"]) == 2
    assert "--out FILE" in capsys.readouterr().err
    assert (here / "digits_cnn_98.toml").read_text() == "# mine"
    assert main(["init", "fashion_cifarnet_94"]) == 2
    assert "did you mean fashion_cifarnet_93?" in capsys.readouterr().err
