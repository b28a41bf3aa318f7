"""Slips of the hand: where a run goes, what its folder holds already, which module a recipe means."""

from pathlib import Path
from typing import Any

import pytest

from helpers.photos import coloured_photos, photos_command
from kasoku.cli import main
from kasoku.config import trust
from kasoku.config.recipe import load
from kasoku.core import InputError
from kasoku.training.run_folder import RunFolder


def test_a_run_among_its_photos_is_refused(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    photos = coloured_photos(tmp_path / "photos")
    monkeypatch.chdir(photos)
    assert main(["train", "--data", "."]) == 2
    assert "runs/photos-1: lies among the photos, as if it were a class: give --out" in capsys.readouterr().err
    assert not (photos / "runs").exists()


def test_a_run_resumed_on_other_classes_is_refused(tmp_path: Path, capsys: Any) -> None:
    command = photos_command(tmp_path, "--set", "epochs=1", "--quiet", "--out", str(tmp_path / "run"))
    assert main(command) == 0
    (tmp_path / "photos" / "colour0").rename(tmp_path / "photos" / "colour9")
    assert main(["train", "--resume", str(tmp_path / "run"), "--set", "epochs=2", "--quiet"]) == 2
    assert "trained on other classes than the data has now: bring that data back" in capsys.readouterr().err


@pytest.mark.parametrize("left", ["member-1/recipe.toml", "checkpoints/step-00000001/model.safetensors"])
def test_a_folder_that_holds_what_another_training_left_is_refused(tmp_path: Path, left: str) -> None:
    (tmp_path / left).parent.mkdir(parents=True)
    (tmp_path / left).write_text("")
    with pytest.raises(InputError, match="holds a run already"):
        RunFolder(tmp_path)


def test_two_modules_of_one_name_are_not_confused(tmp_path: Path) -> None:
    recipe = (Path(__file__).parents[2] / "recipes" / "digits_cnn_98.toml").read_text()
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "slips_net.py").write_text("from kasoku.models import cifarnet as net\n")
        (tmp_path / name / "recipe.toml").write_text(recipe.replace("kasoku.models.cifarnet", "slips_net.net"))
    with trust.only(()):
        for name in ("first", "first"):
            trust.allow_beside(tmp_path / name / "recipe.toml")
            load(tmp_path / name / "recipe.toml")
        with pytest.raises(InputError, match="another module slips_net was imported before"):
            trust.allow_beside(tmp_path / "second" / "recipe.toml")
