"""Slips of the hand: where a run goes, and what its folder holds already."""

from pathlib import Path
from typing import Any

import pytest

from helpers.photos import coloured_photos, photos_command
from kasoku.cli import main
from kasoku.core import InputError
from kasoku.training.run_folder import RunFolder


def test_a_run_among_its_photos_is_refused(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    photos = coloured_photos(tmp_path / "photos")
    monkeypatch.chdir(photos)
    assert main(["train", "--data", "."]) == 2
    assert "runs/photos-1: lies among the photos, as if it were a class: give --out" in capsys.readouterr().err
    assert not (photos / "runs").exists()
    assert main(["train", "--data", ".", "--print"]) == 0


def test_a_run_resumed_on_other_classes_is_refused(tmp_path: Path, capsys: Any) -> None:
    command = photos_command(tmp_path, "--set", "epochs=1", "--quiet", "--out", str(tmp_path / "run"))
    assert main(command) == 0
    (tmp_path / "photos" / "colour0").rename(tmp_path / "photos" / "colour9")
    assert main(["train", "--resume", str(tmp_path / "run"), "--set", "epochs=2", "--quiet"]) == 2
    said = capsys.readouterr().err
    assert "trained on other classes than its data has now (colour0, colour9): bring these back" in said


@pytest.mark.parametrize("left", ["member-1/recipe.toml", "checkpoints/step-00000001/model.safetensors"])
def test_a_folder_that_holds_what_another_training_left_is_refused(tmp_path: Path, left: str) -> None:
    (tmp_path / left).parent.mkdir(parents=True)
    (tmp_path / left).write_text("")
    for _ in range(2):  # it is not left locked
        with pytest.raises(InputError, match="holds a run already"):
            RunFolder(tmp_path)
